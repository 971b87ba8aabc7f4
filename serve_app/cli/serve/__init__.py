"""`talkray serve`: runs Ray and the application on one machine, with a process that supervises both."""
