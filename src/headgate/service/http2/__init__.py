"""The server's side of HTTP/2 (RFC 9113) for small requests, without input and output.

connection.py    one connection: from frames to requests
control.py       settings, windows, pings, resets
output.py        streams, responses, and how much nuisance a peer may make
frames.py        frames, their numbers and limits
request_head.py  the head of a request, remembered by its bytes
hpack.py         compressed headers (RFC 7541)
huffman.py       their Huffman code
"""
