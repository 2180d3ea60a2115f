"""Exact gradient accumulation: SPEC section 2."""
