"""The program of one example, traced and mapped over a lot."""
