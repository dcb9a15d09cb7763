"""The protocol between processes: encoding, lanes, custody, tickets, sockets."""
