/* Loaded before libc (LD_PRELOAD): counts, records and disturbs the changes that a process makes below one folder.

   faults_begin() starts it in this process. Until then, and for everything outside the folder, calls go straight to
   libc. Each change has a number, from 1 on, over all threads. At number `at` the process is killed before or after
   the call, or in the middle of a write; or the call fails with an errno, and so do the `times - 1` changes after it.

   Each change that succeeds is appended to a file of records, from which tests/chaos/replay.py makes what a disk
   would hold if the power had been cut then. A record: kind, offset, lengths, then path, second path and data. */

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
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum how { COUNT = 0, KILL_BEFORE = 1, KILL_AFTER = 2, KILL_WITHIN = 3, FAIL = 4 };

struct header {
    char kind[8];
    int64_t offset;
    int32_t path, second;
    int64_t data;
};

static char folder[4096];
static int record = -1;
static long at, times, made, recorded;
static enum how how;
static int error_number;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

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
    made = recorded = 0;
    if (records)
        record = (int)syscall(SYS_openat, AT_FDCWD, records, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    return !records || record >= 0;
}

void faults_end(void) { folder[0] = 0; }

long faults_made(void) { return made; }

long faults_recorded(void) { return recorded; }

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
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;)
        pause();
}

/* Before a change: 1 where it has to fail with errno, 2 where a write has to be torn. Locks, if it is below. */
static int disturbed(const char *path)
{
    if (!is_below(path))
        return -1;
    pthread_mutex_lock(&lock);
    made++;
    if (how == KILL_BEFORE && made == at)
        die();
    if (how == FAIL && made >= at && made < at + times) {
        pthread_mutex_unlock(&lock);
        errno = error_number;
        return 1;
    }
    return how == KILL_WITHIN && made == at ? 2 : 0;
}

static void note(const char *kind, const char *path, const char *second, const void *data, int64_t size, int64_t offset)
{
    struct header head = {{0}, offset, (int32_t)strlen(path), (int32_t)strlen(second), size};
    struct iovec parts[] = {{&head, sizeof head}, {(void *)path, strlen(path)}, {(void *)second, strlen(second)},
                            {(void *)data, (size_t)size}};
    snprintf(head.kind, sizeof head.kind, "%s", kind);
    recorded++;
    if (record >= 0)
        syscall(SYS_writev, record, parts, 4);
}

/* After a change: `done` says whether it succeeded. Keeps errno. */
static void noted(int done, const char *kind, const char *path, const char *second)
{
    int kept = errno;
    if (done)
        note(kind, path, second, "", 0, 0);
    if (how == KILL_AFTER && made == at)
        die();
    pthread_mutex_unlock(&lock);
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
        size /= 2;
    count = offset < 0 ? syscall(SYS_write, descriptor, data, size)
                       : syscall(SYS_pwrite64, descriptor, data, size, offset);
    if (state < 0)
        return count;
    kept = errno;
    if (count > 0)
        note("write", full, "", data, count, offset < 0 ? lseek(descriptor, 0, SEEK_CUR) - count : offset);
    if (state == 2)
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

/* Of the records' readers: what was copied is read back and recorded as one write. */
ssize_t sendfile(int out, int in, off_t *offset, size_t size)
{
    char full[4096], *data;
    int state = -1;
    ssize_t count;
    if (folder[0])
        state = disturbed(absolute(out, "", full));
    if (state == 1)
        return -1;
    count = syscall(SYS_sendfile, out, in, offset, size);
    if (state < 0)
        return count;
    if (count > 0 && (data = malloc((size_t)count))) {
        off64_t end = lseek(out, 0, SEEK_CUR);
        int copy = (int)syscall(SYS_openat, AT_FDCWD, full, O_RDONLY);
        if (copy >= 0 && syscall(SYS_pread64, copy, data, count, end - count) == count)
            note("write", full, "", data, count, end - count);
        syscall(SYS_close, copy);
        free(data);
    }
    noted(0, "", full, "");
    return count;
}
ssize_t sendfile64(int out, int in, off64_t *offset, size_t size) { return sendfile(out, in, offset, size); }

#define BY_DESCRIPTOR(name, kind, parameters, arguments, where)                                                         \
    int name parameters                                                                                                 \
    {                                                                                                                   \
        char full[4096];                                                                                                \
        int state = folder[0] ? disturbed(absolute(descriptor, "", full)) : -1, result;                                 \
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
BY_NAME(mkdirat, "mkdir", (int dir, const char *path, mode_t mode), (dir, path, mode), dir, path)

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
