"""The pages in Airflow's UI: a FastAPI application of the api-server, and the files that the browser gets.

May know FastAPI, Airflow's authorization and the client of the service; no torch, and nothing of the service's insides.
"""
