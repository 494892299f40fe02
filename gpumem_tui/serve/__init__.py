"""The program in a browser: a web server on this machine's loopback, and a process of the program for each visitor."""
