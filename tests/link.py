"""A wire on loopback between a client and a server, to be cut, silenced, slowed or delayed.

    link = Link(server.port)          # the client connects to 127.0.0.1:link.port
    link.on(b"PUT /bucket/", action)  # once, when a client first says so; then the connection is dropped
"""
import queue
import socket
import threading
import time


class Link:
    """upstream: the server's port; delay: seconds each way; silent: nothing goes through, nothing is closed.

    sent: (time, bytes) of what clients sent on."""

    def __init__(self, upstream, delay=0.0):
        self.upstream, self.delay, self.silent, self.sent = upstream, delay, False, []
        self.words, self.action, self.keep, self.port, self.lock = None, None, False, 0, threading.Lock()
        self.connections = []
        self.open()

    def on(self, words, action, keep=False):
        """keep: the connection stays, and what was said goes on after the action."""
        self.words, self.action, self.keep = words, action, keep

    def open(self):
        self.listener = socket.socket()
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listener.bind(("127.0.0.1", self.port))
        self.listener.listen(64)
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, args=(self.listener,), daemon=True).start()

    def refuse(self):
        """From here on connections are refused; those that there are end. open() is the way back."""
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for connection in self.connections:
            self.end(connection)

    @staticmethod
    def end(connection):
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def accept(self, listener):
        while True:
            try:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", self.upstream))
            except OSError:
                if listener.fileno() < 0:
                    return
                client.close()
                continue
            self.connections += [client, server]
            for source, target, up in ((client, server, True), (server, client, False)):
                ready = queue.Queue()
                threading.Thread(target=self.read, args=(source, target, up, ready), daemon=True).start()
                threading.Thread(target=self.write, args=(target, ready), daemon=True).start()

    def read(self, source, target, up, ready):
        while True:
            try:
                data = source.recv(1 << 16)
            except OSError:
                data = b""
            with self.lock:
                action, drop = None, False
                if up and self.words and self.words in data:
                    action, self.words, drop = self.action, None, not self.keep
            if action:
                action()
            if drop:
                self.end(source), self.end(target)
            while self.silent:
                time.sleep(0.05)
            if up:
                self.sent.append((time.monotonic(), len(data)))
            ready.put((time.monotonic() + self.delay, data))
            if not data:
                return

    def write(self, target, ready):
        while True:
            when, data = ready.get()
            time.sleep(max(0, when - time.monotonic()))
            try:
                target.sendall(data) if data else target.shutdown(socket.SHUT_WR)
            except OSError:
                data = b""
            if not data:
                return

    def close(self):
        self.silent = False
        self.refuse()
