"""A model adapted by a method: rewritten and verified, trained, compared, merged back."""
