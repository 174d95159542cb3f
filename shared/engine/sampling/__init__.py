"""From logits to tokens: grammars, filters, and random numbers that each attempt draws alike."""
