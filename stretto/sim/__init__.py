"""The real router in a simulated world on virtual time: hours of service in seconds, from a seed."""
