"""What callers want of the service, behind the routes: jobs, owners, forecasts, and the pages' questions."""
