"""Programs for people who work on this repository; not shipped."""
