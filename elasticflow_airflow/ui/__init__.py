"""The pages in Airflow's UI: a FastAPI application in the api-server, and the files for the browser.

May import FastAPI, Airflow's authorization and the client of the service, but neither torch nor the service itself.
"""
