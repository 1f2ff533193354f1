/* Loaded before libc (LD_PRELOAD): counts, records and disturbs the changes that a process makes below one folder.

   faults_begin() enables it in this process and in all processes that it forks. Until then, and for all paths outside
   the folder, calls go straight to libc. Changes are numbered from 1, over all threads and processes. At number `at`
   the process is killed before or after the call, or in the middle of a write; or the call fails with an errno, as do
   the next `times - 1` changes; or a write writes and returns only half of its size, as on a disk that becomes full;
   or the process receives the signal `error` and continues.

   Each change that succeeds is appended to a file of records, from which tests/chaos/replay.py computes the content
   of a disk after a power cut at that moment. A record: kind, number, offset, lengths, then paths and data. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum how { COUNT = 0, KILL_BEFORE = 1, KILL_AFTER = 2, KILL_WITHIN = 3, FAIL = 4, SHORT = 5, SIGNAL = 6 };

struct header {
    char kind[8];
    int64_t number, offset;
    int32_t path, second;
    int64_t data;
};

static char folder[4096];
static int record = -1;
static long at, times;
static enum how how;
static int error_number;

/* Shared with all forked processes. The lock is robust: it survives a process that is killed while holding it. */
static struct shared {
    long made, recorded, killed, failed_flushes;
    pthread_mutex_t lock;
} *shared;

__attribute__((constructor)) static void share(void)
{
    pthread_mutexattr_t kind;
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&shared->lock, &kind);
}

static void take_lock(void)
{
    if (pthread_mutex_lock(&shared->lock) == EOWNERDEAD)
        pthread_mutex_consistent(&shared->lock);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* `records`: a file to append to, or NULL. */
int faults_begin(const char *below, const char *records, int what, long number, int error, long fails)
{
    if (record >= 0)
        syscall(SYS_close, record);
    record = -1;
    snprintf(folder, sizeof folder, "%s", below);
    how = what;
    at = number;
    error_number = error;
    times = fails;
    shared->made = shared->recorded = shared->killed = shared->failed_flushes = 0;
    if (records)
        record = (int)syscall(SYS_openat, AT_FDCWD, records, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    return !records || record >= 0;
}

void faults_end(void) { folder[0] = 0; }

long faults_made(void) { return shared->made; }

long faults_recorded(void) { return shared->recorded; }

/* Number of processes that have been killed. */
long faults_killed(void) { return shared->killed; }

/* Number of calls of fsync and fdatasync that have failed. */
long faults_failed_flushes(void) { return shared->failed_flushes; }

static int is_below(const char *path)
{
    size_t length = strlen(folder);
    return length && !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}

/* The absolute path of `path` relative to `at_descriptor`, whether it exists or not. */
static const char *absolute(int at_descriptor, const char *path, char *found)
{
    char base[4096], link[64];
    ssize_t length;
    if (path[0] == '/') {
        snprintf(found, 4096, "%s", path);
        return found;
    }
    if (at_descriptor == AT_FDCWD)
        snprintf(link, sizeof link, "/proc/self/cwd");
    else
        snprintf(link, sizeof link, "/proc/self/fd/%d", at_descriptor);
    length = readlink(link, base, sizeof base - 1);
    if (length < 0)
        length = 0;
    base[length] = 0;
    if (!path[0])
        snprintf(found, 4096, "%s", base);
    else
        snprintf(found, 4096, "%.2000s/%.2000s", base, path);
    return found;
}

static void die(void)
{
    shared->killed++;
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;)
        pause();
}

/* Call before a change. Returns 1 if it must fail with errno, 2 if only half of a write must be done, -1 if the path is
   outside the folder, else 0. Except for 1 and -1, it leaves the lock taken. */
static int disturbed(const char *path)
{
    if (!is_below(path))
        return -1;
    take_lock();
    shared->made++;
    if (how == KILL_BEFORE && shared->made == at)
        die();
    if (how == FAIL && shared->made >= at && shared->made < at + times) {
        pthread_mutex_unlock(&shared->lock);
        errno = error_number;
        return 1;
    }
    if (how == SIGNAL && shared->made == at)
        syscall(SYS_kill, getpid(), error_number);
    return (how == KILL_WITHIN || how == SHORT) && shared->made == at ? 2 : 0;
}

static void note(const char *kind, const char *path, const char *second, const void *data, int64_t size, int64_t offset)
{
    struct header head = {{0}, shared->made, offset, (int32_t)strlen(path), (int32_t)strlen(second), size};
    struct iovec parts[] = {{&head, sizeof head}, {(void *)path, strlen(path)}, {(void *)second, strlen(second)},
                            {(void *)data, (size_t)size}};
    snprintf(head.kind, sizeof head.kind, "%s", kind);
    shared->recorded++;
    if (record >= 0)
        syscall(SYS_writev, record, parts, 4);
}

/* Call after a change. `done`: whether it succeeded. Keeps errno. */
static void noted(int done, const char *kind, const char *path, const char *second)
{
    int kept = errno;
    if (done)
        note(kind, path, second, "", 0, 0);
    if (how == KILL_AFTER && shared->made == at)
        die();
    pthread_mutex_unlock(&shared->lock);
    errno = kept;
}

/* --- files */

static int opened(int at_descriptor, const char *path, int flags, mode_t mode)
{
    char full[4096];
    int state = -1, descriptor, is_new;
    if (folder[0] && (flags & (O_CREAT | O_TRUNC)))
        state = disturbed(absolute(at_descriptor, path, full));
    if (state == 1)
        return -1;
    is_new = state >= 0 && access(full, F_OK);
    descriptor = (int)syscall(SYS_openat, at_descriptor, path, flags, mode);
    if (state >= 0) {
        if (descriptor >= 0 && is_new)
            note("create", full, "", "", 0, 0);
        if (descriptor >= 0 && !is_new && (flags & O_TRUNC))
            note("cut", full, "", "", 0, 0);
        noted(0, "", full, "");
    }
    return descriptor;
}

#define WITH_MODE(flags, mode)                                                                                          \
    mode_t mode = 0;                                                                                                    \
    if ((flags) & (O_CREAT | __O_TMPFILE)) {                                                                            \
        va_list rest;                                                                                                   \
        va_start(rest, flags);                                                                                          \
        mode = va_arg(rest, mode_t);                                                                                    \
        va_end(rest);                                                                                                   \
    }

int open(const char *path, int flags, ...) { WITH_MODE(flags, mode) return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { WITH_MODE(flags, mode) return opened(AT_FDCWD, path, flags, mode); }
int openat(int dir, const char *path, int flags, ...) { WITH_MODE(flags, mode) return opened(dir, path, flags, mode); }
int openat64(int dir, const char *path, int flags, ...) { WITH_MODE(flags, mode) return opened(dir, path, flags, mode); }
int creat(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC, mode); }

/* Return half the size of a write, in whole sectors, which a write with O_DIRECT requires. */
static size_t half(size_t size)
{
    return size < 1024 ? size / 2 : size / 2 & ~(size_t)511;
}

/* C++ opens its files with fopen, and writes to them with write and writev. */
static FILE *opened_stream(const char *path, const char *mode, FILE *(*real)(const char *, const char *))
{
    char full[4096];
    int state = folder[0] && mode[0] != 'r' ? disturbed(absolute(AT_FDCWD, path, full)) : -1, is_new;
    FILE *stream;
    if (state == 1)
        return NULL;
    is_new = state >= 0 && access(full, F_OK);
    stream = real(path, mode);
    if (state >= 0) {
        if (stream && is_new)
            note("create", full, "", "", 0, 0);
        if (stream && !is_new && mode[0] == 'w')
            note("cut", full, "", "", 0, 0);
        noted(0, "", full, "");
    }
    return stream;
}

FILE *fopen(const char *path, const char *mode) { return opened_stream(path, mode, REAL(fopen)); }
FILE *fopen64(const char *path, const char *mode) { return opened_stream(path, mode, REAL(fopen64)); }

static ssize_t written(int descriptor, const void *data, size_t size, off64_t offset)
{
    char full[4096];
    int state = -1, kept;
    ssize_t count;
    if (folder[0])
        state = disturbed(absolute(descriptor, "", full));
    if (state == 1)
        return -1;
    if (state == 2)
        size = half(size);
    count = offset < 0 ? syscall(SYS_write, descriptor, data, size)
                       : syscall(SYS_pwrite64, descriptor, data, size, offset);
    if (state < 0)
        return count;
    kept = errno;
    if (count > 0)
        note("write", full, "", data, count, offset < 0 ? lseek(descriptor, 0, SEEK_CUR) - count : offset);
    if (state == 2 && how == KILL_WITHIN)
        die();
    errno = kept;
    noted(0, "", full, "");
    return count;
}

ssize_t write(int descriptor, const void *data, size_t size) { return written(descriptor, data, size, -1); }
ssize_t pwrite(int descriptor, const void *data, size_t size, off_t offset)
{
    return written(descriptor, data, size, offset);
}
ssize_t pwrite64(int descriptor, const void *data, size_t size, off64_t offset)
{
    return written(descriptor, data, size, offset);
}

/* Record a call that copied `count` bytes into a file as one write of these bytes, which are read back. */
static void note_copied(const char *path, ssize_t count, off64_t offset)
{
    char *data = count > 0 ? malloc((size_t)count) : NULL;
    int kept = errno, copy = data ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY) : -1;
    if (copy >= 0 && syscall(SYS_pread64, copy, data, count, offset) == count)
        note("write", path, "", data, count, offset);
    if (copy >= 0)
        syscall(SYS_close, copy);
    free(data);
    errno = kept;
}

#define BY_MANY(name, descriptor, parameters, call, offset)                                                             \
    ssize_t name parameters                                                                                             \
    {                                                                                                                   \
        char full[4096];                                                                                                \
        int state = folder[0] ? disturbed(absolute(descriptor, "", full)) : -1;                                         \
        ssize_t count;                                                                                                  \
        if (state == 1)                                                                                                 \
            return -1;                                                                                                  \
        count = call;                                                                                                   \
        if (state >= 0) {                                                                                               \
            note_copied(full, count, offset);                                                                           \
            noted(0, "", full, "");                                                                                     \
        }                                                                                                               \
        return count;                                                                                                   \
    }
#define BEFORE(descriptor) (lseek(descriptor, 0, SEEK_CUR) - count)

BY_MANY(sendfile, out, (int out, int in, off_t *from, size_t size), syscall(SYS_sendfile, out, in, from, size),
        BEFORE(out))
BY_MANY(sendfile64, out, (int out, int in, off64_t *from, size_t size), syscall(SYS_sendfile, out, in, from, size),
        BEFORE(out))
BY_MANY(copy_file_range, out, (int in, off64_t *from, int out, off64_t *to, size_t size, unsigned flags),
        syscall(SYS_copy_file_range, in, from, out, to, size, flags), to ? *to - count : BEFORE(out))
BY_MANY(writev, to, (int to, const struct iovec *parts, int number), syscall(SYS_writev, to, parts, number),
        BEFORE(to))
BY_MANY(pwritev, to, (int to, const struct iovec *parts, int number, off_t offset),
        syscall(SYS_pwritev, to, parts, number, (long)offset, 0L), offset)
BY_MANY(pwritev64, to, (int to, const struct iovec *parts, int number, off64_t offset),
        syscall(SYS_pwritev, to, parts, number, (long)offset, 0L), offset)

#define BY_DESCRIPTOR(name, kind, parameters, arguments, where)                                                         \
    int name parameters                                                                                                 \
    {                                                                                                                   \
        char full[4096];                                                                                                \
        int state = folder[0] ? disturbed(absolute(descriptor, "", full)) : -1, result;                                 \
        if (state == 1 && !strcmp(kind, "flush"))                                                                       \
            __sync_fetch_and_add(&shared->failed_flushes, 1);                                                           \
        if (state == 1)                                                                                                 \
            return -1;                                                                                                  \
        result = REAL(name) arguments;                                                                                  \
        if (state >= 0) {                                                                                               \
            if (!result)                                                                                                \
                note(kind, full, "", "", 0, where);                                                                     \
            noted(0, "", full, "");                                                                                     \
        }                                                                                                               \
        return result;                                                                                                  \
    }

BY_DESCRIPTOR(fsync, "flush", (int descriptor), (descriptor), 0)
BY_DESCRIPTOR(fdatasync, "flush", (int descriptor), (descriptor), 0)
BY_DESCRIPTOR(ftruncate, "cut", (int descriptor, off_t size), (descriptor, size), size)
BY_DESCRIPTOR(ftruncate64, "cut", (int descriptor, off64_t size), (descriptor, size), size)

/* Allocate space, or punch a hole: neither changes what a power cut leaves of the writes. */
BY_DESCRIPTOR(fallocate, "room", (int descriptor, int mode, off_t from, off_t size), (descriptor, mode, from, size), 0)
BY_DESCRIPTOR(posix_fallocate, "room", (int descriptor, off_t from, off_t size), (descriptor, from, size), 0)
BY_DESCRIPTOR(fchmod, "mode", (int descriptor, mode_t mode), (descriptor, mode), 0)

/* --- names */

#define BY_NAME(name, kind, parameters, arguments, dir, path)                                                           \
    int name parameters                                                                                                 \
    {                                                                                                                   \
        char full[4096];                                                                                                \
        int state = folder[0] ? disturbed(absolute(dir, path, full)) : -1, result;                                      \
        if (state == 1)                                                                                                 \
            return -1;                                                                                                  \
        result = REAL(name) arguments;                                                                                  \
        if (state >= 0)                                                                                                 \
            noted(!result, kind, full, "");                                                                             \
        return result;                                                                                                  \
    }

BY_NAME(unlink, "unlink", (const char *path), (path), AT_FDCWD, path)
BY_NAME(rmdir, "rmdir", (const char *path), (path), AT_FDCWD, path)
BY_NAME(mkdir, "mkdir", (const char *path, mode_t mode), (path, mode), AT_FDCWD, path)
BY_NAME(chmod, "mode", (const char *path, mode_t mode), (path, mode), AT_FDCWD, path)
BY_NAME(fchmodat, "mode", (int dir, const char *path, mode_t mode, int flags), (dir, path, mode, flags), dir, path)
BY_NAME(utimensat, "time", (int dir, const char *path, const struct timespec to[2], int flags), (dir, path, to, flags),
        dir, path)
BY_NAME(mkdirat, "mkdir", (int dir, const char *path, mode_t mode), (dir, path, mode), dir, path)

int truncate(const char *path, off_t size)
{
    char full[4096];
    int state = folder[0] ? disturbed(absolute(AT_FDCWD, path, full)) : -1, result;
    if (state == 1)
        return -1;
    result = (int)syscall(SYS_truncate, path, size);
    if (state >= 0) {
        if (!result)
            note("cut", full, "", "", 0, size);
        noted(0, "", full, "");
    }
    return result;
}

int unlinkat(int dir, const char *path, int flags)
{
    char full[4096];
    int state = folder[0] ? disturbed(absolute(dir, path, full)) : -1, result;
    if (state == 1)
        return -1;
    result = REAL(unlinkat)(dir, path, flags);
    if (state >= 0)
        noted(!result, flags & AT_REMOVEDIR ? "rmdir" : "unlink", full, "");
    return result;
}

#define BY_TWO_NAMES(name, kind, parameters, arguments, from_dir, from, to_dir, to)                                     \
    int name parameters                                                                                                 \
    {                                                                                                                   \
        char one[4096], other[4096];                                                                                    \
        int state = folder[0] ? disturbed(absolute(to_dir, to, other)) : -1, result;                                    \
        if (state == 1)                                                                                                 \
            return -1;                                                                                                  \
        result = REAL(name) arguments;                                                                                  \
        if (state >= 0)                                                                                                 \
            noted(!result, kind, absolute(from_dir, from, one), other);                                                 \
        return result;                                                                                                  \
    }

BY_TWO_NAMES(rename, "rename", (const char *from, const char *to), (from, to), AT_FDCWD, from, AT_FDCWD, to)
BY_TWO_NAMES(renameat, "rename", (int a, const char *from, int b, const char *to), (a, from, b, to), a, from, b, to)
BY_TWO_NAMES(link, "link", (const char *from, const char *to), (from, to), AT_FDCWD, from, AT_FDCWD, to)
BY_TWO_NAMES(linkat, "link", (int a, const char *from, int b, const char *to, int flags), (a, from, b, to, flags), a,
             from, b, to)

BY_TWO_NAMES(renameat2, "rename", (int a, const char *from, int b, const char *to, unsigned flags),
             (a, from, b, to, flags), a, from, b, to)

int symlink(const char *to, const char *path)
{
    char full[4096];
    int state = folder[0] ? disturbed(absolute(AT_FDCWD, path, full)) : -1, result;
    if (state == 1)
        return -1;
    result = REAL(symlink)(to, path);
    if (state >= 0)
        noted(!result, "symlink", to, full);
    return result;
}

int symlinkat(const char *to, int dir, const char *path)
{
    char full[4096];
    int state = folder[0] ? disturbed(absolute(dir, path, full)) : -1, result;
    if (state == 1)
        return -1;
    result = REAL(symlinkat)(to, dir, path);
    if (state >= 0)
        noted(!result, "symlink", to, full);
    return result;
}
