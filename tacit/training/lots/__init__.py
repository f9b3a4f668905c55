"""The records of each step: read one by one, drawn as lots, cut into microbatches."""
