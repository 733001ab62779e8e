// Inserts, replaces and deletes of small values, each durable when its call
// returns, in one store: the program beneath `scripts/bench-map`, which compiles
// and runs it (failure-atomic msync, Table 2).
//
//     map STORE DIRECTORY KEYS VALUE SEED [THREADS]
//
// runs the three phases, each in a random order of the keys, in a new store in
// DIRECTORY, and prints one JSON object: the store and, by phase, what each
// operation took in nanoseconds, and all of them. After each phase the store is
// closed, opened again, and everything that is in it is compared with what must
// be: a store that lost or changed something has no figures.
//
// With THREADS (1 if it is left out) each thread has KEYS keys of its own.
//
// The stores: `mojim` (the volume of DIRECTORY/mojim.toml, attached on node a)
// and `msync` are a std::map in mapped memory, of which everything is synced
// after each operation; each thread has a map of its own. The others are the
// libraries of that name, one transaction an operation, with the durable
// settings that are said to be fast; LevelDB and RocksDB, which gather what
// several threads write, are one database for all threads. The rest have one
// thread only.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <unordered_map>
#include <vector>

#include <kchashdb.h>
#include <kcplantdb.h>
#include <leveldb/db.h>
#include <lmdb.h>
#include <rocksdb/db.h>
#include <sqlite3.h>

#include <mojim.h>

#include "heap.h"

namespace {

using Text = std::string_view;

[[noreturn]] void fail(const std::string &what) { throw std::runtime_error(what); }

struct Store {
    using Each = std::function<void(Text key, Text value)>;
    virtual ~Store() = default; // closes it
    virtual void insert(Text key, Text value) = 0;
    virtual void replace(Text key, Text value) = 0;
    virtual void remove(Text key) = 0;
    virtual void each(const Each &f) = 0;
    // To be called by each thread that uses it, before anything else.
    virtual void enter() {}
};

// ---- std::map in mapped memory ----------------------------------------------

class StdMap : public Store {
public:
    void insert(Text key, Text value) override
    {
        if (!map->emplace(String(key), String(value)).second)
            fail("the key is there");
        sync();
    }
    void replace(Text key, Text value) override
    {
        map->find(key)->second.assign(value);
        sync();
    }
    void remove(Text key) override
    {
        map->erase(map->find(key));
        sync();
    }
    void each(const Each &f) override
    {
        for (const auto &[key, value] : *map)
            f(key, value);
    }
    void enter() override { Heap::open(memory, size); }

protected:
    StdMap(std::size_t size) : size(size) {}
    virtual void sync() = 0;

    void open()
    {
        Heap *heap = static_cast<Heap *>(memory);
        if (!Heap::open(memory, size)) {
            heap->root = new (heap->allocate(sizeof(Map))) Map;
            sync();
        }
        map = static_cast<Map *>(heap->root);
    }

    const std::size_t size;
    void *memory;

private:
    using String = std::basic_string<char, std::char_traits<char>, InHeap<char>>;
    using Map = std::map<String, String, std::less<>, InHeap<std::pair<const String, String>>>;
    Map *map = nullptr;
};

// Attached until the last map of it is closed.
using Volume = std::shared_ptr<mojim_t>;

Volume attach(const std::string &dir)
{
    mojim_t *volume = mojim_attach((dir + "/mojim.toml").c_str(), "a", nullptr);
    if (volume == nullptr)
        fail(mojim_last_error());
    return Volume(volume, [](mojim_t *v) {
        if (mojim_detach(v) != 0)
            std::cerr << mojim_last_error() << '\n', abort();
    });
}

class Mojim : public StdMap {
public:
    Mojim(Volume of, std::size_t size, std::size_t number) : StdMap(size), volume(std::move(of))
    {
        const std::string name = "map" + std::to_string(number);
        memory = mojim_map_at(volume.get(), name.c_str(), size, MOJIM_CREATE | MAP_ATOMIC, 0,
                              Heap::address(number));
        if (memory == MAP_FAILED)
            fail(mojim_last_error());
        open();
    }

protected:
    void sync() override
    {
        if (mojim_msync(memory, size, MS_SYNC) != 0)
            fail(mojim_last_error());
    }

private:
    Volume volume;
};

// Not atomic: a crash may leave any of the pages in the file.
class Msync : public StdMap {
public:
    Msync(const std::string &dir, std::size_t size) : StdMap(size)
    {
        int fd = ::open((dir + "/map").c_str(), O_RDWR | O_CREAT, 0644);
        // In small pieces, and all of it there: msync is at its best with those.
        const std::string piece(4096, '\0');
        if (fd >= 0 && lseek(fd, 0, SEEK_END) == 0)
            while (lseek(fd, 0, SEEK_CUR) < off_t(size))
                if (write(fd, piece.data(), piece.size()) != ssize_t(piece.size()))
                    fail("writing the file");
        if (fd < 0 || fsync(fd) != 0)
            fail("making the file");
        int flags = MAP_SHARED | MAP_FIXED_NOREPLACE;
        memory = mmap(Heap::address(0), size, PROT_READ | PROT_WRITE, flags, fd, 0);
        close(fd);
        if (memory == MAP_FAILED)
            fail("mapping the file");
        open();
    }
    ~Msync() override { munmap(memory, size); }

protected:
    void sync() override
    {
        if (msync(memory, size, MS_SYNC) != 0)
            fail("msync");
    }
};

// ---- the others --------------------------------------------------------------

class Sqlite : public Store {
public:
    Sqlite(const std::string &dir, const std::string &journal)
    {
        check(sqlite3_open((dir + "/db").c_str(), &db));
        run("PRAGMA locking_mode = EXCLUSIVE");
        run("PRAGMA journal_mode = " + journal);
        run("PRAGMA synchronous = FULL");
        run("CREATE TABLE IF NOT EXISTS map (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID");
        insert_ = prepare("INSERT INTO map VALUES (?1, ?2)");
        replace_ = prepare("UPDATE map SET value = ?2 WHERE key = ?1");
        remove_ = prepare("DELETE FROM map WHERE key = ?1");
    }
    ~Sqlite() override
    {
        for (auto s : {insert_, replace_, remove_})
            sqlite3_finalize(s);
        sqlite3_close(db);
    }
    void insert(Text key, Text value) override { step(insert_, key, &value); }
    void replace(Text key, Text value) override { step(replace_, key, &value); }
    void remove(Text key) override { step(remove_, key, nullptr); }
    void each(const Each &f) override
    {
        sqlite3_stmt *s = prepare("SELECT key, value FROM map");
        auto text = [&](int i) {
            auto p = static_cast<const char *>(sqlite3_column_blob(s, i));
            return Text(p, std::size_t(sqlite3_column_bytes(s, i)));
        };
        while (sqlite3_step(s) == SQLITE_ROW)
            f(text(0), text(1));
        check(sqlite3_finalize(s));
    }

private:
    void check(int code)
    {
        if (code != SQLITE_OK)
            fail(sqlite3_errmsg(db));
    }
    void run(const std::string &sql)
    {
        check(sqlite3_exec(db, sql.c_str(), nullptr, nullptr, nullptr));
    }
    sqlite3_stmt *prepare(const char *sql)
    {
        sqlite3_stmt *s = nullptr;
        check(sqlite3_prepare_v3(db, sql, -1, SQLITE_PREPARE_PERSISTENT, &s, nullptr));
        return s;
    }
    void step(sqlite3_stmt *s, Text key, const Text *value)
    {
        check(sqlite3_bind_text(s, 1, key.data(), int(key.size()), SQLITE_STATIC));
        if (value != nullptr)
            check(sqlite3_bind_blob(s, 2, value->data(), int(value->size()), SQLITE_STATIC));
        if (sqlite3_step(s) != SQLITE_DONE || sqlite3_changes(db) != 1)
            fail(sqlite3_errmsg(db));
        check(sqlite3_reset(s));
    }
    sqlite3 *db;
    sqlite3_stmt *insert_, *replace_, *remove_;
};

template <class Db>
class Kyoto : public Store {
public:
    Kyoto(const std::string &path)
    {
        using kyotocabinet::BasicDB;
        check(db.open(path, BasicDB::OWRITER | BasicDB::OCREATE | BasicDB::OAUTOTRAN |
                                BasicDB::OAUTOSYNC));
    }
    ~Kyoto() override { db.close(); }
    void insert(Text k, Text v) override { check(db.add(k.data(), k.size(), v.data(), v.size())); }
    void replace(Text k, Text v) override
    {
        check(db.replace(k.data(), k.size(), v.data(), v.size()));
    }
    void remove(Text k) override { check(db.remove(k.data(), k.size())); }
    void each(const Each &f) override
    {
        std::unique_ptr<kyotocabinet::BasicDB::Cursor> c(db.cursor());
        std::string key, value;
        c->jump();
        while (c->get(&key, &value, true))
            f(key, value);
    }

private:
    void check(bool ok)
    {
        if (!ok)
            fail(db.error().message());
    }
    Db db;
};

class Level : public Store {
public:
    Level(const std::string &dir)
    {
        leveldb::Options o;
        o.create_if_missing = true;
        leveldb::DB *p;
        check(leveldb::DB::Open(o, dir + "/db", &p));
        db.reset(p);
        durable.sync = true;
    }
    // The same database, for another thread.
    Level(const Level &other) = default;
    void insert(Text k, Text v) override
    {
        check(db->Put(durable, slice(k), slice(v)));
    }
    void replace(Text k, Text v) override { insert(k, v); }
    void remove(Text k) override { check(db->Delete(durable, slice(k))); }
    void each(const Each &f) override
    {
        std::unique_ptr<leveldb::Iterator> i(db->NewIterator({}));
        for (i->SeekToFirst(); i->Valid(); i->Next())
            f({i->key().data(), i->key().size()}, {i->value().data(), i->value().size()});
        check(i->status());
    }

private:
    static leveldb::Slice slice(Text t) { return {t.data(), t.size()}; }
    static void check(const leveldb::Status &s)
    {
        if (!s.ok())
            fail(s.ToString());
    }
    std::shared_ptr<leveldb::DB> db;
    leveldb::WriteOptions durable;
};

class Rocks : public Store {
public:
    Rocks(const std::string &dir)
    {
        rocksdb::Options o;
        o.create_if_missing = true;
        rocksdb::DB *p;
        check(rocksdb::DB::Open(o, dir + "/db", &p));
        db.reset(p);
        durable.sync = true;
    }
    // The same database, for another thread.
    Rocks(const Rocks &other) = default;
    void insert(Text k, Text v) override { check(db->Put(durable, slice(k), slice(v))); }
    void replace(Text k, Text v) override { insert(k, v); }
    void remove(Text k) override { check(db->Delete(durable, slice(k))); }
    void each(const Each &f) override
    {
        std::unique_ptr<rocksdb::Iterator> i(db->NewIterator({}));
        for (i->SeekToFirst(); i->Valid(); i->Next())
            f({i->key().data(), i->key().size()}, {i->value().data(), i->value().size()});
        check(i->status());
    }

private:
    static rocksdb::Slice slice(Text t) { return {t.data(), t.size()}; }
    static void check(const rocksdb::Status &s)
    {
        if (!s.ok())
            fail(s.ToString());
    }
    std::shared_ptr<rocksdb::DB> db;
    rocksdb::WriteOptions durable;
};

class Lmdb : public Store {
public:
    Lmdb(const std::string &dir, std::size_t size, unsigned flags)
    {
        check(mdb_env_create(&env));
        check(mdb_env_set_mapsize(env, size));
        check(mdb_env_open(env, (dir + "/db").c_str(), MDB_NOSUBDIR | flags, 0644));
        transaction(0, [&](MDB_txn *t) { return mdb_dbi_open(t, nullptr, 0, &map); });
    }
    ~Lmdb() override { mdb_env_close(env); }
    void insert(Text key, Text value) override { put(key, value, MDB_NOOVERWRITE); }
    void replace(Text key, Text value) override { put(key, value, 0); }
    void remove(Text key) override
    {
        MDB_val k = val(key);
        transaction(0, [&](MDB_txn *t) { return mdb_del(t, map, &k, nullptr); });
    }
    void each(const Each &f) override
    {
        transaction(MDB_RDONLY, [&](MDB_txn *t) {
            MDB_cursor *c;
            MDB_val k, v;
            check(mdb_cursor_open(t, map, &c));
            while (mdb_cursor_get(c, &k, &v, MDB_NEXT) == 0)
                f({static_cast<char *>(k.mv_data), k.mv_size},
                  {static_cast<char *>(v.mv_data), v.mv_size});
            mdb_cursor_close(c);
            return 0;
        });
    }

private:
    static MDB_val val(Text t) { return {t.size(), const_cast<char *>(t.data())}; }
    void put(Text key, Text value, unsigned flags)
    {
        MDB_val k = val(key), v = val(value);
        transaction(0, [&](MDB_txn *t) { return mdb_put(t, map, &k, &v, flags); });
    }
    template <class F>
    void transaction(unsigned flags, F f)
    {
        MDB_txn *t;
        check(mdb_txn_begin(env, nullptr, flags, &t));
        check(f(t));
        check(mdb_txn_commit(t));
    }
    static void check(int code)
    {
        if (code != 0)
            fail(mdb_strerror(code));
    }
    MDB_env *env;
    MDB_dbi map;
};

// ---- the phases -----------------------------------------------------------------

// A store for each thread.
using Stores = std::vector<std::unique_ptr<Store>>;

template <class Db>
Stores shared(const Db &first, std::size_t threads)
{
    Stores all;
    for (std::size_t i = 0; i < threads; i++)
        all.push_back(std::make_unique<Db>(first));
    return all;
}

std::unique_ptr<Store> open_one(const std::string &name, const std::string &dir, std::size_t size)
{
    if (name == "msync")
        return std::make_unique<Msync>(dir, size);
    if (name == "sqlite-wal")
        return std::make_unique<Sqlite>(dir, "WAL");
    if (name == "sqlite-delete")
        return std::make_unique<Sqlite>(dir, "DELETE");
    if (name == "kyoto-hash")
        return std::make_unique<Kyoto<kyotocabinet::HashDB>>(dir + "/db.kch");
    if (name == "kyoto-tree")
        return std::make_unique<Kyoto<kyotocabinet::TreeDB>>(dir + "/db.kct");
    if (name == "lmdb")
        return std::make_unique<Lmdb>(dir, 2 * size, 0);
    if (name == "lmdb-writemap")
        return std::make_unique<Lmdb>(dir, 2 * size, MDB_WRITEMAP);
    fail("no store " + name);
}

Stores open(const std::string &name, const std::string &dir, std::size_t bytes, std::size_t threads)
{
    // Room for a copy of every value, nodes and pages that are half full.
    std::size_t size = (4 * bytes + (4 << 20)) & ~std::size_t(4095);
    Stores all;
    if (name == "mojim") {
        Volume volume = attach(dir);
        for (std::size_t i = 0; i < threads; i++)
            all.push_back(std::make_unique<Mojim>(volume, size, i));
    } else if (name == "leveldb") {
        all = shared(Level(dir), threads);
    } else if (name == "rocksdb") {
        all = shared(Rocks(dir), threads);
    } else if (threads > 1) {
        fail(name + " is measured with one thread only");
    } else {
        all.push_back(open_one(name, dir, size));
    }
    return all;
}

using Model = std::unordered_map<std::string, std::string>;

// One thread of a run: its keys, and what must be in the store of them.
struct Worker {
    std::mt19937_64 random;
    std::vector<std::string> keys;
    std::size_t bytes;
    Model model;
    std::vector<std::int64_t> took;
    std::string wrong;

    std::string value()
    {
        std::string v(bytes, '\0');
        for (char &c : v)
            c = char(random());
        return v;
    }

    void operate(Store &store, const std::string &phase, const std::string &key)
    {
        const std::string v = value();
        auto begin = std::chrono::steady_clock::now();
        if (phase == "insert")
            store.insert(key, v);
        else if (phase == "replace")
            store.replace(key, v);
        else
            store.remove(key);
        std::chrono::nanoseconds time = std::chrono::steady_clock::now() - begin;
        took.push_back(time.count());
        if (phase == "delete")
            model.erase(key);
        else
            model[key] = v;
    }

    void work(Store &store, const std::string &phase)
    try {
        store.enter();
        for (const std::string &key : keys)
            operate(store, phase, key);
    } catch (const std::exception &e) {
        wrong = e.what();
    }
};

// Whether the stores have what the models say, together, and nothing else.
void verify(const Stores &stores, const std::vector<Worker> &workers, const std::string &phase)
{
    Model found;
    for (const auto &store : stores)
        store->each([&](Text key, Text value) { found.emplace(key, value); });
    std::size_t all = 0;
    for (const Worker &w : workers) {
        all += w.model.size();
        for (const auto &[key, value] : w.model) {
            auto i = found.find(key);
            if (i == found.end() || i->second != value)
                fail("after " + phase + ": " + key + " is not what it must be");
        }
    }
    if (all != found.size())
        fail("after " + phase + ": " + std::to_string(found.size()) + " of " +
             std::to_string(all) + " keys");
}

// One phase on all threads; what it took, in nanoseconds.
std::int64_t run_phase(const Stores &stores, std::vector<Worker> &workers, const std::string &phase)
{
    for (Worker &w : workers) {
        std::shuffle(w.keys.begin(), w.keys.end(), w.random);
        w.took.clear();
    }
    auto begin = std::chrono::steady_clock::now();
    std::vector<std::thread> threads;
    for (std::size_t i = 1; i < workers.size(); i++)
        threads.emplace_back([&, i] { workers[i].work(*stores[i], phase); });
    workers[0].work(*stores[0], phase);
    for (std::thread &t : threads)
        t.join();
    std::chrono::nanoseconds all = std::chrono::steady_clock::now() - begin;
    for (const Worker &w : workers)
        if (!w.wrong.empty())
            fail(w.wrong);
    return all.count();
}

void run(int argc, char **args)
{
    const std::string name = args[1], dir = args[2];
    const std::size_t keys = std::stoul(args[3]), bytes = std::stoul(args[4]);
    const std::size_t seed = std::stoul(args[5]), threads = argc > 6 ? std::stoul(args[6]) : 1;
    // Stands for a store that loses or changes something: the checker must see it.
    const char *broken = getenv("BENCH_MAP_BROKEN");
    std::vector<Worker> workers(threads);
    for (std::size_t t = 0; t < threads; t++) {
        workers[t].random.seed(seed * 1000 + t);
        workers[t].bytes = bytes;
        for (std::size_t i = 0; i < keys; i++) {
            char key[32];
            snprintf(key, sizeof key, "key%013zu", t * keys + i);
            workers[t].keys.emplace_back(key);
        }
    }
    auto again = [&] { return open(name, dir, keys * (bytes + 64), threads); };
    Stores stores = again();
    std::cout << "{\"store\":\"" << name << '"';
    for (const std::string phase : {"insert", "replace", "delete"}) {
        std::int64_t all = run_phase(stores, workers, phase);
        std::cout << ",\"" << phase << "_all\":" << all << ",\"" << phase << "\":[";
        const char *between = "";
        for (const Worker &w : workers)
            for (std::int64_t ns : w.took)
                std::cout << between << ns, between = ",";
        std::cout << ']';
        if (broken != nullptr && phase == broken) {
            stores[0]->enter();
            if (phase == "delete")
                stores[0]->insert(workers[0].keys[0], "back");
            else
                stores[0]->remove(workers[0].keys[0]);
        }
        stores.clear();
        stores = again();
        verify(stores, workers, phase);
    }
    std::cout << "}\n";
}

} // namespace

int main(int argc, char **argv)
{
    if (argc != 6 && argc != 7) {
        std::cerr << "usage: map STORE DIRECTORY KEYS VALUE SEED [THREADS]\n";
        return 2;
    }
    try {
        run(argc, argv);
    } catch (const std::exception &e) {
        std::cerr << argv[1] << ": " << e.what() << '\n';
        return 1;
    }
    return 0;
}
