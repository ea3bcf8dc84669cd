"""One module an engine kind: `layout(ctx)` writes `repository/<model>/...` into the output of `package`."""
