/* The table of a shared file, for processes that have a compiler's help: find a key, compare and swap its word, commit
   a larger state. It knows no algorithm: which state comes next, and which key may lose its slot, is decided in Python.

   The file (layout.py has the same numbers): a page of header, SEATS seats, the sets, the cells.

   A set is HEAD words, the fingerprints of SLOTS keys, and as many payloads. The first word of a set is its lock. A key
   is in its set or nowhere. A payload is one word, changed by compare-and-swap without the lock; or a version and two
   buffers, of which the lowest bit of the version says which one counts. A commit writes the other buffer, and cells
   that do not count yet, and then the version: it is all there or not at all, wherever the process is killed.

   A seat is a byte of the file that a process holds by a lock of the kernel as long as it lives, and two words: how
   often the seat was taken, and the set whose lock its process is about to take. The lock word of a set names the seat
   of its holder and that number. If the kernel says that this seat is free, its process is dead, and a waiter takes the
   lock over. There is nothing to repair: a commit is all there or not at all.

   The threads of a process share its seat, so one of them at a time may hold a lock. The interpreter lock sees to that;
   without one, a mutex of the table does. All else that threads share is constant, or changed by compare-and-swap. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

_Static_assert(sizeof(unsigned long) == 8, "words of 64 bits");

#define LAYOUT 1
#define PAGE 4096
#define SEATS 1024
#define SEAT_WORDS 8
#define HEAD 2
#define SLOTS 31
#define LOCKS (1LL << 40)               /* where the bytes to lock begin, far behind the data */
#define TOMB (1ULL << 63)               /* the word of a slot that changes its key; no state is as large */
#define MOST_HEADER 256                 /* words of a larger state */
#define MOST_PIECES 128                 /* pieces of cells in one commit */
#define SPINS 200
#define PATIENCE 500000000LL            /* nanoseconds to wait for a holder that is alive and does not run */

#ifdef F_OFD_SETLK                      /* Linux: the lock belongs to the opened file, not to the process */
#define TRY_LOCK F_OFD_SETLK
#define ASK_LOCK F_OFD_GETLK
#else
#define TRY_LOCK F_SETLK
#define ASK_LOCK F_GETLK
#endif

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

static inline uint64_t load(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static inline void store(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
static inline int compare_and_swap(uint64_t *p, uint64_t expected, uint64_t v) {
    return __atomic_compare_exchange_n(p, &expected, v, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

typedef struct {
    PyObject_HEAD
    Py_buffer map;
    int fd;                             /* its own opened file: the lock of the seat belongs to it */
    uint64_t sets, header;              /* header: words of a larger state, 0 for states of one word */
    uint64_t near, far;                 /* cells of a slot: near ones lie together, far ones are room to grow */
    uint64_t payload, set_words;
    uint64_t *seats, *first, *first_near, *first_far;
    uint64_t secret[2];
    uint64_t *seat, id;
    unsigned long forks;                /* `forks` when the seat was taken: it is not that of a forked child */
#ifdef Py_GIL_DISABLED
    PyMutex mutex;                      /* held with the lock of a set, by one thread of this process */
#else
    PyObject *last_key;                 /* the key that was placed last, and where: its next call is likely to follow */
    uint64_t last_print, last_index;
#endif
} Table;

#ifdef Py_GIL_DISABLED
#define LOCK_THREADS(t) PyMutex_Lock(&(t)->mutex)
#define UNLOCK_THREADS(t) PyMutex_Unlock(&(t)->mutex)
#else
#define LOCK_THREADS(t) ((void)0)
#define UNLOCK_THREADS(t) ((void)0)
#endif

typedef struct {
    uint64_t print, index;
    uint64_t *set;
} Place;

/* ------------------------------------------------------------------------------------------- the place of a key */

#define ROTATE(x, b) (((x) << (b)) | ((x) >> (64 - (b))))
#define SIP_ROUND                                                                                                      \
    do {                                                                                                               \
        a += b; b = ROTATE(b, 13); b ^= a; a = ROTATE(a, 32);                                                          \
        c += d; d = ROTATE(d, 16); d ^= c;                                                                             \
        a += d; d = ROTATE(d, 21); d ^= a;                                                                             \
        c += b; b = ROTATE(b, 17); b ^= c; c = ROTATE(c, 32);                                                          \
    } while (0)

/* SipHash-2-4 with 128 bits, keyed by the secret of the file: a client cannot choose keys that share a set */
static void sip_hash(const unsigned char *text, size_t size, const uint64_t *secret, uint64_t *one, uint64_t *two) {
    uint64_t a = 0x736f6d6570736575ULL ^ secret[0], b = 0x646f72616e646f6dULL ^ secret[1] ^ 0xee;
    uint64_t c = 0x6c7967656e657261ULL ^ secret[0], d = 0x7465646279746573ULL ^ secret[1];
    uint64_t word, tail = (uint64_t)size << 56;
    size_t whole = size / 8, i;
    for (i = 0; i < whole; i++) {
        memcpy(&word, text + 8 * i, 8);
        d ^= word;
        SIP_ROUND;
        SIP_ROUND;
        a ^= word;
    }
    for (i = 8 * whole; i < size; i++) tail |= (uint64_t)text[i] << (8 * (i & 7));
    d ^= tail;
    SIP_ROUND;
    SIP_ROUND;
    a ^= tail;
    c ^= 0xee;
    for (i = 0; i < 4; i++) SIP_ROUND;
    *one = a ^ b ^ c ^ d;
    b ^= 0xdd;
    for (i = 0; i < 4; i++) SIP_ROUND;
    *two = a ^ b ^ c ^ d;
}

static inline uint64_t *set_at(Table *t, uint64_t index) { return t->first + index * t->set_words; }
static inline uint64_t *prints_of(uint64_t *set) { return set + HEAD; }
static inline uint64_t *payload_of(Table *t, uint64_t *set, uint64_t slot) {
    return set + HEAD + SLOTS + slot * t->payload;
}

static int hash_key(Table *t, PyObject *key, uint64_t *print, uint64_t *index) {
    Py_ssize_t size;
    const char *text;
    uint64_t hash;
    if (!PyUnicode_Check(key)) {
        PyErr_SetString(PyExc_TypeError, "a key is text");
        return -1;
    }
    text = PyUnicode_AsUTF8AndSize(key, &size);
    if (!text) return -1;
    sip_hash((const unsigned char *)text, (size_t)size, t->secret, &hash, print);
    if (!*print) *print = 1;
    *index = (uint64_t)(((unsigned __int128)hash * t->sets) >> 64);
    return 0;
}

static int find_place(Table *t, PyObject *key, Place *place) {
#ifdef Py_GIL_DISABLED
    if (hash_key(t, key, &place->print, &place->index)) return -1;
#else
    if (key != t->last_key) {
        PyObject *before = t->last_key;
        if (hash_key(t, key, &t->last_print, &t->last_index)) return -1;
        t->last_key = Py_NewRef(key);
        Py_XDECREF(before);
    }
    place->print = t->last_print;
    place->index = t->last_index;
#endif
    place->set = set_at(t, place->index);
    return 0;
}

/* -------------------------------------------------------------------------------------------- the lock of a set */

static int byte_lock(int fd, int command, uint64_t seat, short *kind) {
    struct flock lock;
    int result;
    memset(&lock, 0, sizeof lock);
    lock.l_type = *kind;
    lock.l_whence = SEEK_SET;
    lock.l_start = (off_t)(LOCKS + (long long)seat);
    lock.l_len = 1;
    result = fcntl(fd, command, &lock);
    *kind = lock.l_type;
    return result;
}

/* whether the process that wrote *word* as its lock is gone */
static int is_dead(Table *t, uint64_t word) {
    uint64_t seat = word & 0xffff;
    short kind = F_WRLCK;
    if (word == t->id) return 1;  /* left by a crash: no thread of ours holds a set lock while another one asks */
    if (seat == 0 || seat >= SEATS) return 1;
    return byte_lock(t->fd, ASK_LOCK, seat, &kind) == 0 && kind == F_UNLCK;
}

static long long nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (long long)now.tv_sec * 1000000000LL + now.tv_nsec;
}

static unsigned long forks;  /* between this process and the one that loaded the library; to ask for a pid takes longer */
static void count_fork(void) { forks++; }

static int take_lock(Table *t, const Place *place) {
    long long begun = 0;
    int tries;
    if (forks != t->forks) {
        PyErr_SetString(PyExc_ChildProcessError, "the table was opened before a fork");
        return -1;
    }
    LOCK_THREADS(t);
    for (tries = 0;; tries++) {
        uint64_t holder;
        store(&t->seat[1], place->index + 1);  /* before the lock: the next process in this seat looks there */
        holder = load(place->set);
        if (holder == 0 && compare_and_swap(place->set, 0, t->id)) return 0;
        if (tries < SPINS) {
            PAUSE();
            continue;
        }
        if (holder != 0 && is_dead(t, holder) && compare_and_swap(place->set, holder, t->id)) return 0;
        store(&t->seat[1], 0);
        if (!begun) begun = nanoseconds();
        else if (nanoseconds() - begun > PATIENCE) {
            UNLOCK_THREADS(t);
            PyErr_SetString(PyExc_TimeoutError, "another process holds a lock of the shared file and does not run");
            return -1;
        }
        UNLOCK_THREADS(t);
        Py_BEGIN_ALLOW_THREADS
        if (tries < SPINS + 20) sched_yield();
        else {
            struct timespec nap = {0, 50000};
            nanosleep(&nap, NULL);
        }
        Py_END_ALLOW_THREADS
        LOCK_THREADS(t);
    }
}

static void drop_lock(Table *t, const Place *place) {
    store(place->set, 0);
    store(&t->seat[1], 0);
    UNLOCK_THREADS(t);
}

/* ------------------------------------------------------------------------------------------- states of one word */

static int as_word(PyObject *number, uint64_t *word) {
    *word = PyLong_AsUnsignedLong(number);  /* as wide here, and quicker than its long long twin */
    return *word == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

static int expect(Py_ssize_t given, Py_ssize_t wanted) {
    if (given == wanted) return 0;
    PyErr_Format(PyExc_TypeError, "takes %zd arguments, got %zd", wanted, given);
    return -1;
}

static int as_slot(PyObject *number, uint64_t *slot) {
    if (as_word(number, slot)) return -1;
    if (*slot < SLOTS) return 0;
    PyErr_SetString(PyExc_IndexError, "no such slot");
    return -1;
}

static PyObject *find(Table *t, PyObject *key) {
    Place place;
    uint64_t i;
    if (find_place(t, key, &place)) return NULL;
    uint64_t *prints = prints_of(place.set), *words = payload_of(t, place.set, 0);
    for (i = 0; i < SLOTS; i++)
        if (load(&prints[i]) == place.print) {
            uint64_t word = load(&words[i]);
            /* read again: between the two reads the slot may have changed its key, and with it the word */
            if (word != TOMB && load(&prints[i]) == place.print) return PyLong_FromUnsignedLongLong(word);
        }
    Py_RETURN_NONE;
}

static PyObject *swap(Table *t, PyObject *const *args, Py_ssize_t count) {
    Place place;
    uint64_t before, after, i;
    if (expect(count, 3) || as_word(args[1], &before) || as_word(args[2], &after) || find_place(t, args[0], &place))
        return NULL;
    uint64_t *prints = prints_of(place.set), *words = payload_of(t, place.set, 0);
    for (i = 0; i < SLOTS; i++)
        if (load(&prints[i]) == place.print && compare_and_swap(&words[i], before, after)) {
            if (load(&prints[i]) == place.print) Py_RETURN_TRUE;
            compare_and_swap(&words[i], after, before);  /* it went to another key, whose word was the same: undo */
        }
    Py_RETURN_FALSE;
}

static int has_word(Table *t, const Place *place) {
    uint64_t i, *prints = prints_of(place->set), *words = payload_of(t, place->set, 0);
    for (i = 0; i < SLOTS; i++)
        if (load(&prints[i]) == place->print && load(&words[i]) != TOMB) return 1;
    return 0;
}

static PyObject *add(Table *t, PyObject *const *args, Py_ssize_t count) {
    Place place;
    uint64_t word, i;
    long done = -1;
    if (expect(count, 2) || as_word(args[1], &word) || find_place(t, args[0], &place) || take_lock(t, &place))
        return NULL;
    uint64_t *prints = prints_of(place.set), *words = payload_of(t, place.set, 0);
    if (has_word(t, &place)) done = 0;
    for (i = 0; done < 0 && i < SLOTS; i++)
        if (load(&prints[i]) == 0 || load(&words[i]) == TOMB) {
            store(&words[i], TOMB);
            store(&prints[i], place.print);
            store(&words[i], word);
            done = 1;
        }
    drop_lock(t, &place);
    return PyLong_FromLong(done);
}

static PyObject *look(Table *t, PyObject *const *args, Py_ssize_t count) {
    Place place;
    uint64_t slot;
    if (expect(count, 2) || as_slot(args[1], &slot) || find_place(t, args[0], &place)) return NULL;
    uint64_t print = load(&prints_of(place.set)[slot]), word = load(payload_of(t, place.set, slot));
    if (print == 0 || word == TOMB) Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(word);
}

static PyObject *replace(Table *t, PyObject *const *args, Py_ssize_t count) {
    Place place;
    uint64_t slot, before, after;
    int done;
    if (expect(count, 4) || as_slot(args[1], &slot) || as_word(args[2], &before) || as_word(args[3], &after) ||
        find_place(t, args[0], &place) || take_lock(t, &place))
        return NULL;
    uint64_t *word = payload_of(t, place.set, slot);
    done = !has_word(t, &place) && compare_and_swap(word, before, TOMB);  /* its key may be spending just now */
    if (done) {
        store(&prints_of(place.set)[slot], place.print);
        store(word, after);
    }
    drop_lock(t, &place);
    return PyBool_FromLong(done);
}

/* ------------------------------------------------------------------------------------------------- larger states */

typedef struct {
    uint64_t start, size;
    const char *words;
} Piece;

typedef struct {
    uint64_t header[MOST_HEADER];
    Piece pieces[MOST_PIECES];
    Py_ssize_t count;
} Change;

/* Read the arguments of a commit: the header, and the cells as start, bytes, start, bytes. */
static int parse_change(Table *t, PyObject *header, PyObject *cells, Change *change) {
    Py_ssize_t i;
    if (!PyTuple_Check(header) || (uint64_t)PyTuple_GET_SIZE(header) != t->header || !PyTuple_Check(cells) ||
        PyTuple_GET_SIZE(cells) % 2 || PyTuple_GET_SIZE(cells) / 2 > MOST_PIECES) {
        PyErr_SetString(PyExc_ValueError, "a tuple of all words, and a tuple of starts and bytes");
        return -1;
    }
    for (i = 0; i < PyTuple_GET_SIZE(header); i++)
        if (as_word(PyTuple_GET_ITEM(header, i), &change->header[i])) return -1;
    change->count = PyTuple_GET_SIZE(cells) / 2;
    for (i = 0; i < change->count; i++) {
        Piece *piece = &change->pieces[i];
        PyObject *words = PyTuple_GET_ITEM(cells, 2 * i + 1);
        if (as_word(PyTuple_GET_ITEM(cells, 2 * i), &piece->start)) return -1;
        if (!PyBytes_Check(words) || PyBytes_GET_SIZE(words) % 8) {
            PyErr_SetString(PyExc_ValueError, "cells are bytes of whole words");
            return -1;
        }
        piece->words = PyBytes_AS_STRING(words);
        piece->size = (uint64_t)PyBytes_GET_SIZE(words) / 8;
        if (piece->start > t->near + t->far || piece->size > t->near + t->far - piece->start ||
            (piece->start < t->near && piece->size > t->near - piece->start)) {
            PyErr_SetString(PyExc_IndexError, "no such cells");
            return -1;
        }
    }
    return 0;
}

static inline uint64_t *buffer_of(Table *t, uint64_t *payload, uint64_t version) {
    return payload + 1 + (version & 1) * t->header;
}

/* Write what comes after *version*. With the lock held. */
static void commit(Table *t, const Place *place, uint64_t slot, uint64_t version, const Change *change) {
    uint64_t *payload = payload_of(t, place->set, slot), *buffer = buffer_of(t, payload, version + 1), word;
    uint64_t *near = t->first_near + (place->index * SLOTS + slot) * t->near;
    uint64_t *far = t->first_far + (place->index * SLOTS + slot) * t->far, i, j;
    __atomic_thread_fence(__ATOMIC_RELEASE);  /* a reader that sees one of these words sees the version before them */
    for (i = 0; i < (uint64_t)change->count; i++) {
        const Piece *piece = &change->pieces[i];
        uint64_t *cells = piece->start < t->near ? near + piece->start : far + (piece->start - t->near);
        for (j = 0; j < piece->size; j++) {
            memcpy(&word, piece->words + 8 * j, 8);
            __atomic_store_n(&cells[j], word, __ATOMIC_RELAXED);
        }
    }
    for (i = 0; i < t->header; i++) __atomic_store_n(&buffer[i], change->header[i], __ATOMIC_RELAXED);
    store(payload, version + 1);
}

static int seek(const Place *place, uint64_t *slot) {
    uint64_t i, *prints = prints_of(place->set);
    for (i = 0; i < SLOTS; i++)
        if (load(&prints[i]) == place->print) {
            *slot = i;
            return 1;
        }
    return 0;
}

/* (place, version, words...) of a slot that holds *print*; None if it does not, or changes all the time */
static PyObject *snapshot(Table *t, const Place *place, uint64_t slot, uint64_t print) {
    uint64_t words[MOST_HEADER], *payload = payload_of(t, place->set, slot), version = 0, i;
    int tries, whole = 0;
    for (tries = 0; tries < 1000 && !whole; tries++) {
        version = load(payload);
        uint64_t *buffer = buffer_of(t, payload, version);
        for (i = 0; i < t->header; i++) words[i] = __atomic_load_n(&buffer[i], __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (load(&prints_of(place->set)[slot]) != print) Py_RETURN_NONE;
        whole = load(payload) == version;
    }
    if (!whole) Py_RETURN_NONE;
    PyObject *found = PyTuple_New((Py_ssize_t)t->header + 2);
    if (!found) return NULL;
    for (i = 0; i < t->header + 2; i++) {
        PyObject *item = PyLong_FromUnsignedLongLong(i == 0   ? place->index * SLOTS + slot
                                                     : i == 1 ? version
                                                              : words[i - 2]);
        if (!item) {
            Py_DECREF(found);
            return NULL;
        }
        PyTuple_SET_ITEM(found, (Py_ssize_t)i, item);
    }
    return found;
}

static PyObject *read_state(Table *t, PyObject *key) {
    Place place;
    uint64_t slot;
    if (find_place(t, key, &place)) return NULL;
    if (!seek(&place, &slot)) Py_RETURN_NONE;
    return snapshot(t, &place, slot, place.print);
}

static PyObject *read_at(Table *t, PyObject *const *args, Py_ssize_t count) {
    Place place;
    uint64_t slot, print;
    if (expect(count, 2) || as_slot(args[1], &slot) || find_place(t, args[0], &place)) return NULL;
    print = load(&prints_of(place.set)[slot]);
    if (!print) Py_RETURN_NONE;
    return snapshot(t, &place, slot, print);
}

static PyObject *still(Table *t, PyObject *const *args, Py_ssize_t count) {
    Place place;
    uint64_t slot, version;
    if (expect(count, 3) || as_slot(args[1], &slot) || as_word(args[2], &version) || find_place(t, args[0], &place))
        return NULL;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return PyBool_FromLong(load(payload_of(t, place.set, slot)) == version &&
                           load(&prints_of(place.set)[slot]) == place.print);
}

static PyObject *write_state(Table *t, PyObject *const *args, Py_ssize_t count) {
    Place place;
    Change change;
    uint64_t slot, version;
    int done;
    if (expect(count, 5) || as_slot(args[1], &slot) || as_word(args[2], &version) ||
        parse_change(t, args[3], args[4], &change) || find_place(t, args[0], &place) || take_lock(t, &place))
        return NULL;
    done = load(&prints_of(place.set)[slot]) == place.print && load(payload_of(t, place.set, slot)) == version;
    if (done) commit(t, &place, slot, version, &change);
    drop_lock(t, &place);
    return PyBool_FromLong(done);
}

/* Give the slot to *key*, with its first state. With the lock held. */
static void settle(Table *t, const Place *place, uint64_t slot, const Change *change) {
    uint64_t *print = &prints_of(place->set)[slot];
    store(print, 0);
    commit(t, place, slot, load(payload_of(t, place->set, slot)), change);  /* versions go on: none comes twice */
    store(print, place->print);
}

static PyObject *add_state(Table *t, PyObject *const *args, Py_ssize_t count) {
    Place place;
    Change change;
    uint64_t slot, i;
    long done = -1;
    if (expect(count, 3) || parse_change(t, args[1], args[2], &change) || find_place(t, args[0], &place) ||
        take_lock(t, &place))
        return NULL;
    for (i = 0; i < SLOTS && load(&prints_of(place.set)[i]); i++) {}  // a free slot
    if (seek(&place, &slot)) {
        done = 0;
    } else if (i < SLOTS) {
        settle(t, &place, i, &change);
        done = 1;
    }
    drop_lock(t, &place);
    return PyLong_FromLong(done);
}

static PyObject *replace_state(Table *t, PyObject *const *args, Py_ssize_t count) {
    Place place;
    Change change;
    uint64_t slot, version, other;
    int done;
    if (expect(count, 5) || as_slot(args[1], &slot) || as_word(args[2], &version) ||
        parse_change(t, args[3], args[4], &change) || find_place(t, args[0], &place) || take_lock(t, &place))
        return NULL;
    done = !seek(&place, &other) && load(payload_of(t, place.set, slot)) == version;
    if (done) settle(t, &place, slot, &change);
    drop_lock(t, &place);
    return PyBool_FromLong(done);
}

/* ---------------------------------------------------------------------------------------------------- the object */

static int take_seat(Table *t) {
    uint64_t i;
    for (i = 1; i < SEATS; i++) {
        short kind = F_WRLCK;
        uint64_t *seat = t->seats + i * SEAT_WORDS, set, holder;
        if (byte_lock(t->fd, TRY_LOCK, i, &kind)) {
            if (errno == EACCES || errno == EAGAIN || errno == EINTR) continue;
            PyErr_SetFromErrno(PyExc_OSError);
            return -1;
        }
        t->seat = seat;
        t->forks = forks;
        store(&seat[0], load(&seat[0]) + 1);  /* first: no lock that a dead process has taken looks like one of ours */
        t->id = load(&seat[0]) << 16 | i;
        set = load(&seat[1]);
        if (set && set <= t->sets) {  /* the process before us may have died with this lock */
            holder = load(set_at(t, set - 1));
            if ((holder & 0xffff) == i) compare_and_swap(set_at(t, set - 1), holder, 0);
        }
        store(&seat[1], 0);
        return 0;
    }
    PyErr_Format(PyExc_OSError, "%d processes use this file already", SEATS - 1);
    return -1;
}

static int table_init(Table *t, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"map", "fd", "sets", "header", "near", "far", "secret", "secret_2", NULL};
    PyObject *map;
    unsigned long long sets, header, near, far, one, two;
    int fd;
    if (t->map.obj) {
        PyErr_SetString(PyExc_TypeError, "a table is opened once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OiKKKKKK", names, &map, &fd, &sets, &header, &near, &far, &one,
                                     &two))
        return -1;
    if (PyObject_GetBuffer(map, &t->map, PyBUF_WRITABLE)) return -1;
    t->fd = fd;
    t->sets = sets;
    t->header = header;
    t->near = near;
    t->far = far;
    t->payload = header ? 1 + 2 * header : 1;
    t->set_words = HEAD + SLOTS + SLOTS * t->payload;
    t->secret[0] = one;
    t->secret[1] = two;
    t->seats = (uint64_t *)t->map.buf + PAGE / 8;
    t->first = t->seats + SEATS * SEAT_WORDS;
    t->first_near = t->first + sets * t->set_words;
    t->first_far = t->first_near + sets * SLOTS * near;
    if (header > MOST_HEADER || !sets || sets > 1ULL << 30 || near > 1ULL << 24 || far > 1ULL << 36 ||
        (uint64_t)(t->first - (uint64_t *)t->map.buf) +
                (unsigned __int128)sets * (t->set_words + SLOTS * (near + far)) >
            (uint64_t)t->map.len / 8) {
        PyErr_SetString(PyExc_ValueError, "the file is smaller than its table");
        return -1;
    }
    return take_seat(t);
}

static void table_dealloc(Table *t) {
    PyTypeObject *type = Py_TYPE(t);
#ifndef Py_GIL_DISABLED
    Py_XDECREF(t->last_key);
#endif
    if (t->map.obj) PyBuffer_Release(&t->map);
    type->tp_free((PyObject *)t);
    Py_DECREF(type);
}

static PyObject *set_index(Table *t, PyObject *key) {
    Place place;
    return find_place(t, key, &place) ? NULL : PyLong_FromUnsignedLongLong(place.index);
}

static PyObject *get_seat(Table *t, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(t->id & 0xffff);
}

#define FAST(name, function, text) {name, (PyCFunction)(void (*)(void))function, METH_FASTCALL, text}
static PyMethodDef methods[] = {
    {"set_index", (PyCFunction)set_index, METH_O, "set_index(key): the number of its set."},
    {"find", (PyCFunction)find, METH_O, "find(key): the word of key, or None."},
    FAST("swap", swap, "swap(key, before, after): store after if the word is still before."),
    FAST("add", add, "add(key, word): 1 if key is new and has an unused slot now; 0 if it is there; -1 if there is none."),
    FAST("look", look, "look(key, slot): the word of a slot in the set of key, or None if it is free."),
    FAST("replace", replace, "replace(key, slot, before, after): give the slot to key if its word is still before."),
    {"read", (PyCFunction)read_state, METH_O, "read(key): (place, version, words...), or None. A place counts the slots of all sets."},
    FAST("read_at", read_at, "read_at(key, slot): the same for a slot in the set of key."),
    FAST("still", still, "still(key, slot, version): whether that is what key has."),
    FAST("write", write_state, "write(key, slot, version, words, cells): commit if it is still that version."),
    FAST("add_state", add_state, "add_state(key, words, cells): as add."),
    FAST("replace_state", replace_state, "replace_state(key, slot, version, words, cells): as replace."),
    {NULL, NULL, 0, NULL}};
static PyGetSetDef getters[] = {{"seat", (getter)get_seat, NULL, "the number of our seat", NULL}, {0}};
static PyType_Slot type_slots[] = {{Py_tp_init, table_init},
                                   {Py_tp_dealloc, table_dealloc},
                                   {Py_tp_methods, methods},
                                   {Py_tp_getset, getters},
                                   {Py_tp_doc, "The table of one shared file; see the head of _table.c."},
                                   {0, NULL}};
static PyType_Spec type_spec = {"headgate.stores.shared._table.Table", sizeof(Table), 0, Py_TPFLAGS_DEFAULT, type_slots};

static int prepare(PyObject *module) {
    static int watched;
    PyObject *type;
    if (!watched && pthread_atfork(NULL, NULL, count_fork)) {
        PyErr_NoMemory();
        return -1;
    }
    watched = 1;
    type = PyType_FromSpec(&type_spec);
    if (!type || PyModule_AddObject(module, "Table", type) < 0) {
        Py_XDECREF(type);
        return -1;
    }
    return PyModule_AddIntConstant(module, "LAYOUT", LAYOUT) || PyModule_AddIntConstant(module, "SEATS", SEATS) ||
                   PyModule_AddIntConstant(module, "SLOTS", SLOTS)
               ? -1
               : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, prepare},
#ifdef Py_mod_gil
                                          {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
                                          {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_table", "The table of a shared file, in C.", 0, NULL,
                                        module_slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__table(void) { return PyModuleDef_Init(&definition); }
