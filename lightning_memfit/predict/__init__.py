"""What one optimizer step will need in bytes and in seconds, worked out from numbers alone."""
