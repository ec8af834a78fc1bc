"""The torch implementations that define every kernel."""
