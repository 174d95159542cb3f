"""HTTP/2 connections with limits, and the short way of small messages through them."""
