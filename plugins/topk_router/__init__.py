"""DeepSeek-V3 routing: sigmoid scores, a correction bias, and a limit on the groups a token may visit."""
