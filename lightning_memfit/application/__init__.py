"""What a user's application trains: made of its config or of its functions, and planned for a device."""
