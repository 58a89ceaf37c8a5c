"""The compiled step: straight-line code in place of autograd."""
