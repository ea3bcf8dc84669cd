"""One package an engine kind; each has `toolchain(config)`, and `build.build(ctx)`, which alone imports heavy things."""
