"""Text and token ids: tokenizer, chat template, and one token at a time back to text."""
