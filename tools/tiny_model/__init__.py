"""The built-in model `tedi-tiny`: its tasks, tokenizer, training and evaluation."""
