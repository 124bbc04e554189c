"""Levers: each is applied to a live Trainer or module and hands back the function that undoes it."""
