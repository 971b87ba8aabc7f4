"""What several suites of tests and experiments share: servers, clients, and how each dialect is asked."""
