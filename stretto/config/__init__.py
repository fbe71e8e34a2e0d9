"""Files, flags and environment become one frozen `Settings`, or one error with all mistakes."""
