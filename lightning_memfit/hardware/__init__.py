"""What a device is and how it is found."""
