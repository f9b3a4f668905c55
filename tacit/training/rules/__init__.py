"""Layer rules: per-example gradients of an operator in factored form, for all examples at once."""
