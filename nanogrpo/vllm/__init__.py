"""The vLLM sidecar: its client, the HTTP protocol, access control, and the weight sync.

Start with client.py.
"""
