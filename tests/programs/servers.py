"""Servers: a client of theirs works, and asks again after the takeover."""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap

from cluster import HERE, LIMIT, free_port, run, start, until
from kinds import Compiled, Worker, dpkg, feed, program


@program("Redis, AOF always", lambda: re.search(r"v=(\S+)", run(["redis-server", "--version"]))[1], ["redis-server"])
class Redis(Worker):
    def server(self):
        self.port = free_port()
        args = ["redis-server", "--port", str(self.port), "--dir", str(self.at), "--appendonly", "yes",
                "--appendfsync", "always", "--save", "", "--bind", "127.0.0.1"]
        self.process = start(args, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)

        def up():
            try:
                return self.ask("PING") == "+PONG" or None
            except OSError:
                return None

        until("redis", up)

    def ask(self, line):
        with socket.create_connection(("127.0.0.1", self.port), 20) as s:
            s.sendall(line.encode() + b"\r\n")
            return s.makefile().readline().strip()

    def work(self):
        self.server()
        code = """
            import socket, sys
            s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
            f = s.makefile()
            n = 0
            while True:
                n += 1
                s.sendall(b'INCR n\\r\\n')
                assert f.readline().strip() == ':%d' % n
                print(n, flush=True)
        """
        args = [sys.executable, "-c", textwrap.dedent(code), str(self.port)]
        return start(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def check(self):
        self.process.kill()
        self.process.wait()
        self.server()
        with socket.create_connection(("127.0.0.1", self.port), 20) as s:
            s.sendall(b"GET n\r\n")
            f = s.makefile()
            f.readline()
            return int(f.readline())

    def end(self):
        self.process.kill()
        self.process.wait()


def postgres_bin():
    found = sorted(pathlib.Path("/usr/lib/postgresql").glob("*/bin"))
    return found[-1] if found else pathlib.Path("/nowhere")


@program("PostgreSQL, data checksums", lambda: run([postgres_bin() / "postgres", "--version"]).split()[-1].strip(")"),
         [str(postgres_bin() / "initdb"), "fuser"])
class Postgres(Worker):
    @property
    def data(self):
        return self.at / "data"

    def as_user(self, *args):
        return ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", *map(str, args)]

    def prepare(self):
        run(["chown", "postgres:postgres", self.at])
        run(self.as_user(postgres_bin() / "initdb", "-D", self.data, "--data-checksums", "-A", "trust"), cwd="/")

    def server(self):
        self.port = free_port()
        args = self.as_user(postgres_bin() / "postgres", "-D", self.data, "-p", self.port, "-k", "/tmp",
                            "-c", "shared_buffers=16MB")
        self.process = start(args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/")
        ready = self.as_user(postgres_bin() / "pg_isready", "-h", "/tmp", "-p", self.port)
        until("postgres", lambda: subprocess.run(ready, capture_output=True, check=False).returncode == 0)

    def psql(self, sql):
        args = self.as_user("psql", "-h", "/tmp", "-p", self.port, "-qtA", "-c", sql, "postgres")
        return run(args, cwd="/")

    def work(self):
        self.server()
        self.psql("create table t (n serial primary key, x text)")
        one = "insert into t (x) values (repeat('x', 200)) returning n;\n"
        args = self.as_user("psql", "-h", "/tmp", "-p", self.port, "-qtA", "postgres")
        p = start(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/")
        feed(p, (one for _ in range(1000000)))
        return p

    def stop(self):
        self.process.kill()
        self.process.wait()
        # Its children end when they notice, and until then nothing may be started.
        held = ["fuser", "-s", f"{self.port}/tcp"]
        until("the end of postgres", lambda: subprocess.run(held, check=False).returncode != 0)
        run(["rm", "-f", self.data / "postmaster.pid"])

    def check(self):
        self.stop()
        self.server()
        rows, most, size = self.psql("select count(*), max(n), sum(length(x)) from t").split("|")
        assert rows == most and int(size) == 200 * int(rows), f"{rows} rows, the last {most}, {size} bytes"
        return int(rows)

    def end(self):
        self.process.send_signal(signal.SIGINT)
        self.process.wait()


@program("MariaDB, InnoDB", lambda: run(["mariadbd", "--version"]).split()[2], ["mariadbd", "mariadb"])
class MariaDb(Worker):
    @property
    def data(self):
        return self.at / "data"

    def prepare(self):
        run(["chown", "mysql:mysql", self.at])
        run(["mariadb-install-db", "--user=mysql", f"--datadir={self.data}", "--auth-root-authentication-method=normal",
             "--skip-test-db"])

    def server(self):
        self.socket = pathlib.Path(tempfile.gettempdir()) / f"mojim-maria-{os.getpid()}.sock"
        args = ["mariadbd", "--user=mysql", f"--datadir={self.data}", f"--socket={self.socket}", "--skip-networking",
                "--innodb-flush-log-at-trx-commit=1", f"--pid-file={self.socket}.pid"]
        self.process = start(args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ready = ["mariadb", f"--socket={self.socket}", "-uroot", "-e", "select 1"]
        until("mariadbd", lambda: subprocess.run(ready, capture_output=True, check=False).returncode == 0)

    def sql(self, text):
        return run(["mariadb", f"--socket={self.socket}", "-uroot", "-N", "-B", "-e", text])

    def work(self):
        self.server()
        self.sql("create database w; create table w.t (n int primary key, x varchar(300)) engine=innodb")
        args = ["mariadb", f"--socket={self.socket}", "-uroot", "-N", "-B", "--unbuffered", "w"]
        p = start(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        feed(p, (f"insert into t values ({n}, repeat('x', 200)); select {n};\n" for n in range(1, 1000000)))
        return p

    def check(self):
        self.process.kill()
        self.process.wait()
        self.server()
        assert "OK" in self.sql("check table w.t extended")
        n, most = map(int, self.sql("select count(*), max(n) from w.t").split())
        assert n == most, f"{n} rows, the last {most}"
        return n

    def end(self):
        self.process.kill()
        self.process.wait()


@program("Key-value server, examples/kvserver", lambda: dpkg("libkyotocabinet-dev"), ["c++", "/usr/include/kchashdb.h", "kchashmgr"])
class KeyValue(Compiled):
    FILE = "kv.kch"
    # Nothing is committed but by the server's msync.
    options = ("--commit-interval", "never")
    CLIENT = """
        import itertools, socket, sys
        # Connections take turns: what was acknowledged to one is read by the next.
        all = [socket.create_connection(('127.0.0.1', int(sys.argv[1])), 60).makefile('rw') for _ in range(3)]
        turns = itertools.cycle(all)
        def ask(line):
            f = next(turns)
            f.write(line + '\\n')
            f.flush()
            said = f.readline()
            assert said, 'the server ended'
            return said[:-1]
        def value(n):
            return f'{n} ' + 'x' * (n * 37 % 2000)
        def there(n):
            said = ask(f'get k{n}')
            assert said in ('none', 'value ' + value(n)), said
            return said != 'none'
        n = 0
        if sys.argv[2] == 'check':
            while there(n + 1): n += 1
            assert not any(there(n + k) for k in range(2, 10))
            print(n)
        while sys.argv[2] == 'work':
            n += 1
            assert n == 1 or there(n - 1)
            if n % 5 == 0:
                assert [ask(f'{what} k{n}') for what in ('set', 'remove', 'remove')] == ['ok', 'ok', 'none']
            assert ask(f'set k{n} {value(n)}') == 'ok'
            print(n, flush=True)
    """

    def compiler(self):
        examples = HERE.parent.parent / "examples/kvserver"
        for name, more in (("server", ["-lkyotocabinet"]), ("load", [])):
            run(["c++", "-std=c++17", "-O1", "-pthread", examples / f"{name}.cpp", "-o", self.home / name, *more])
        # Both loads, in each way.
        ways = [f"{w}={self.at}" for w in ("synchronize", "transaction", "no-sync")]
        said = run([self.home / "load", "--json", "--seconds", "0.03", self.home / "server", *ways])
        rows = [json.loads(line) for line in said.splitlines()]
        assert len(rows) == 18 and all(r["requests_per_second"] > 0 for r in rows), said

    def server(self):
        # It ends with this program, whatever ends that.
        args = ["setpriv", "--pdeathsig", "KILL", self.home / "server", "synchronize", self.at / self.FILE]
        self.process = start(args, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        said = self.process.stdout.readline().split()
        # A sync point leaves nothing to repair.
        assert said[:1] == ["port"] and said[2:] == ["clean"], said
        return [sys.executable, "-c", textwrap.dedent(self.CLIENT), said[1]]

    def work(self):
        return subprocess.Popen([*self.server(), "work"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def check(self):
        self.process.kill()
        self.process.wait()
        client = self.server()
        found = int(subprocess.run([*client, "check"], stdout=subprocess.PIPE, check=True, timeout=LIMIT).stdout)
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(LIMIT) == 0
        run(["kchashmgr", "check", self.at / self.FILE])
        return found

    def end(self):
        self.process.kill()
        self.process.wait()
        super().end()


@program("slapd, back-mdb", lambda: dpkg("slapd"), ["slapd", "ldapadd", "ldapsearch"])
class Slapd(Worker):
    least = 100

    def prepare(self):
        self.home = pathlib.Path(tempfile.mkdtemp())
        run(["mkdir", self.at / "ldap"])

    def server(self):
        self.port = free_port()
        conf = self.home / "slapd.conf"
        conf.write_text(textwrap.dedent(f"""
            include /etc/ldap/schema/core.schema
            modulepath /usr/lib/ldap
            moduleload back_mdb
            pidfile {self.home}/pid
            database mdb
            suffix "dc=x"
            rootdn "cn=admin,dc=x"
            rootpw secret
            directory {self.at}/ldap
            maxsize 67108864
        """))
        self.url = f"ldap://127.0.0.1:{self.port}"
        args = ["slapd", "-d", "0", "-f", conf, "-h", self.url]
        self.process = start(args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ready = ["ldapsearch", "-x", "-H", self.url, "-s", "base", "-b", "", "1.1"]
        until("slapd", lambda: subprocess.run(ready, capture_output=True, check=False).returncode == 0)

    def work(self):
        self.server()
        code = """
            import subprocess, sys
            def add(text):
                subprocess.run(['ldapadd', '-x', '-H', sys.argv[1], '-D', 'cn=admin,dc=x', '-w', 'secret'],
                               input=text, text=True, check=True, stdout=subprocess.DEVNULL)
            add('dn: dc=x\\nobjectClass: dcObject\\nobjectClass: organization\\no: x\\ndc: x\\n')
            n = 0
            while True:
                n += 1
                add(f'dn: cn={n},dc=x\\nobjectClass: person\\ncn: {n}\\nsn: {n * 7}\\n')
                print(n, flush=True)
        """
        args = [sys.executable, "-c", textwrap.dedent(code), self.url]
        return subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def check(self):
        self.process.kill()
        self.process.wait()
        self.server()
        said = run(["ldapsearch", "-x", "-LLL", "-H", self.url, "-b", "dc=x", "(objectClass=person)", "cn", "sn"])
        found = dict(zip(re.findall(r"^cn: (\d+)$", said, re.M), re.findall(r"^sn: (\d+)$", said, re.M)))
        numbers = sorted(map(int, found))
        assert numbers == list(range(1, len(numbers) + 1)) and all(int(v) == 7 * int(k) for k, v in found.items())
        return len(numbers)

    def end(self):
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.home)


@program("memcached -e", lambda: run(["memcached", "-V"]).split()[1], ["memcached"])
class Memcached(Worker):
    # It syncs nothing while it serves. When SIGUSR1 ends it, it syncs the items, a mapped file, and then writes
    # another, without which it starts empty: that one nobody syncs, but the `sync` here.
    least = 300
    acknowledged = "stored, memcached ended by SIGUSR1, the .meta that it left synced by `sync`"
    CODE = """
        import signal, socket, subprocess, sys, time
        file, port = sys.argv[1] + '/items', sys.argv[2]
        def value(n):
            return b'%d ' % n + b'x' * (n * 37 % 2000)
        def serve():
            # It ends with this program, whatever ends that.
            p = subprocess.Popen(['setpriv', '--pdeathsig', 'KILL', 'memcached', '-u', 'root', '-l', '127.0.0.1',
                                  '-p', port, '-U', '0', '-m', '64', '-e', file], stderr=subprocess.DEVNULL)
            while True:
                assert p.poll() is None, 'memcached ended'
                try:
                    s = socket.create_connection(('127.0.0.1', int(port)), 20)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.02)
            return p, s, s.makefile('rb')
    """
    WORK = """
        p, s, f = serve()
        for n in range(1, 301):
            s.sendall(b'set k%d 0 0 %d\\r\\n%s\\r\\n' % (n, len(value(n)), value(n)))
            assert f.readline() == b'STORED\\r\\n'
        p.send_signal(signal.SIGUSR1)
        assert p.wait(60) == 0
        subprocess.run(['sync', file + '.meta'], check=True)
        # In the second in which it ended it would start empty, anywhere.
        ended = int(time.time())
        while int(time.time()) == ended: time.sleep(0.02)
        print(n, flush=True)
        # Until it is killed: the mount of `mojim run` is there while it is used.
        signal.pause()
    """
    CHECK = """
        p, s, f = serve()
        def there(n):
            s.sendall(b'get k%d\\r\\n' % n)
            head = f.readline()
            if head == b'END\\r\\n':
                return False
            assert head == b'VALUE k%d 0 %d\\r\\n' % (n, len(value(n))), head
            assert f.read(len(value(n)) + 2) == value(n) + b'\\r\\n' and f.readline() == b'END\\r\\n', n
            return True
        n = 0
        while there(n + 1): n += 1
        p.kill()
        p.wait()
        print(n)
    """

    def command(self, code):
        return [sys.executable, "-c", textwrap.dedent(self.CODE) + textwrap.dedent(code), self.at, free_port()]

    def work(self):
        return start(self.command(self.WORK), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def check(self):
        return int(run(self.command(self.CHECK)).split()[-1])
