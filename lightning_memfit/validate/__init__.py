"""Prove a plan on the real model without a trace: snapshot, meter, warm-up, the guard against inexact slicing."""
