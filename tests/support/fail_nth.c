// Preloaded into a process, makes the n-th call of one kind fail: allocations and maps of at least so many bytes, opens,
// reads, writes. Armed by `fail_nth`; counts calls from there on. For tests/system/test_fail_nth.py, on Linux with the GNU C library.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { kNone, kAlloc, kMap, kOpen, kRead, kWrite };

static atomic_int armed = kNone;
static atomic_long left = 0, seen = 0;
static size_t least_bytes = 0;

extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
extern void* __libc_memalign(size_t, size_t);

// Calls of `kind` fail once, at the n-th from now (0: none, they are only counted).
void fail_nth(int kind, long n, size_t least) {
    least_bytes = least;
    atomic_store(&seen, 0);
    atomic_store(&left, n);
    atomic_store(&armed, kind);
}

long calls_seen(void) { return atomic_load(&seen); }

static int fails(enum kind kind, int error) {
    if (atomic_load(&armed) != (int)kind) return 0;
    atomic_fetch_add(&seen, 1);
    if (atomic_fetch_sub(&left, 1) != 1) return 0;
    errno = error;
    return 1;
}

static int lacks(size_t bytes) { return bytes >= least_bytes && fails(kAlloc, ENOMEM); }

void* malloc(size_t bytes) { return lacks(bytes) ? NULL : __libc_malloc(bytes); }

void* calloc(size_t count, size_t bytes) { return lacks(count * bytes) ? NULL : __libc_calloc(count, bytes); }

void* realloc(void* old, size_t bytes) { return lacks(bytes) ? NULL : __libc_realloc(old, bytes); }

void* aligned_alloc(size_t align, size_t bytes) { return lacks(bytes) ? NULL : __libc_memalign(align, bytes); }

int posix_memalign(void** found, size_t align, size_t bytes) {
    if (lacks(bytes)) return ENOMEM;
    *found = __libc_memalign(align, bytes);
    return *found ? 0 : ENOMEM;
}

void* mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    if (bytes >= least_bytes && fails(kMap, ENOMEM)) return MAP_FAILED;
    return (void*)syscall(SYS_mmap, at, bytes, protection, flags, fd, offset);
}

void* mmap64(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    return mmap(at, bytes, protection, flags, fd, offset);
}

static int open_at(int folder, const char* path, int flags, mode_t mode) {
    return fails(kOpen, EMFILE) ? -1 : (int)syscall(SYS_openat, folder, path, flags, mode);
}

#define MODE(last) \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { \
        va_list more; \
        va_start(more, last); \
        mode = va_arg(more, mode_t); \
        va_end(more); \
    }

int open(const char* path, int flags, ...) {
    MODE(flags)
    return open_at(AT_FDCWD, path, flags, mode);
}

int open64(const char* path, int flags, ...) {
    MODE(flags)
    return open_at(AT_FDCWD, path, flags, mode);
}

int openat(int folder, const char* path, int flags, ...) {
    MODE(flags)
    return open_at(folder, path, flags, mode);
}

int openat64(int folder, const char* path, int flags, ...) {
    MODE(flags)
    return open_at(folder, path, flags, mode);
}

ssize_t read(int fd, void* to, size_t bytes) { return fails(kRead, EIO) ? -1 : syscall(SYS_read, fd, to, bytes); }

ssize_t pread(int fd, void* to, size_t bytes, off_t at) {
    return fails(kRead, EIO) ? -1 : syscall(SYS_pread64, fd, to, bytes, at);
}

ssize_t pread64(int fd, void* to, size_t bytes, off_t at) { return pread(fd, to, bytes, at); }

ssize_t preadv(int fd, const struct iovec* to, int count, off_t at) {
    return fails(kRead, EIO) ? -1 : syscall(SYS_preadv, fd, to, count, at, 0);
}

ssize_t preadv64(int fd, const struct iovec* to, int count, off_t at) { return preadv(fd, to, count, at); }

ssize_t write(int fd, const void* from, size_t bytes) {
    return fails(kWrite, ENOSPC) ? -1 : syscall(SYS_write, fd, from, bytes);
}

ssize_t pwrite(int fd, const void* from, size_t bytes, off_t at) {
    return fails(kWrite, ENOSPC) ? -1 : syscall(SYS_pwrite64, fd, from, bytes, at);
}

ssize_t pwrite64(int fd, const void* from, size_t bytes, off_t at) { return pwrite(fd, from, bytes, at); }
