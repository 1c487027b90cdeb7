"""Plain torch operations that the native models share."""
