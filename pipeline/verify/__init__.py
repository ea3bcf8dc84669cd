"""How far a converted checkpoint is from its source: weights without torch (`weights`), logits with it (`logits`); and what is
wrong with anyone's checkpoint (`invariants`, `foreign`)."""
