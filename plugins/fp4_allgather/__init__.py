"""Hidden states between ranks in FP8 or NVFP4: quantised before they travel, not after."""
