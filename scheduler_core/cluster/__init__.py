"""The cluster: its nodes, which slots a gang gets, and what is free when."""
