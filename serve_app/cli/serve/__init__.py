"""`talkray serve`: Ray and the application on one machine, and the process that watches both."""
