"""What splitting operators costs on live workers."""
