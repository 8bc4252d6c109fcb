// LD_PRELOAD: notes every write, truncation, sync and removal of files in the folder CAIRN_DISK_FOLDER, in the order in
// which they happened, in the file CAIRN_DISK_LOG. The disk itself stays honest: tests/chaos/disk.py replays the notes to
// any moment, as a disk that was cut off there could hold it.
//
// A note: 'W', 'T', 'S' or 'U', then little endian: u16 length of the name, u64 offset (of 'T': the new size), u32 length
// of the data; then name and data.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int notes = -2;

static void note(char op, const char *path, uint64_t offset, const void *data, uint32_t length) {
    const char *folder = getenv("CAIRN_DISK_FOLDER"), *log = getenv("CAIRN_DISK_LOG");
    if (!folder || !log || strncmp(path, folder, strlen(folder)) != 0) return;
    const char *name = path + strlen(folder);
    uint16_t size = (uint16_t)strlen(name);
    if (notes == -2) notes = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    char head[15];
    head[0] = op;
    memcpy(head + 1, &size, 2);
    memcpy(head + 3, &offset, 8);
    memcpy(head + 11, &length, 4);
    // A plain write: three of them are one note, since the lock is held.
    if (syscall(SYS_write, notes, head, sizeof head) < 0 || syscall(SYS_write, notes, name, (size_t)size) < 0) abort();
    if (length && syscall(SYS_write, notes, data, (size_t)length) < 0) abort();
}

static void note_fd(char op, int fd, uint64_t offset, const void *data, uint32_t length) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n <= 0) return;
    path[n] = 0;
    note(op, path, offset, data, length);
}

#define HELD(call)                    \
    pthread_mutex_lock(&lock);        \
    long done = (call);               \
    if (done >= 0) { NOTED; }         \
    pthread_mutex_unlock(&lock);      \
    return done

#define NOTED note_fd('W', fd, (uint64_t)offset, data, (uint32_t)done)
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t offset) { HELD(syscall(SYS_pwrite64, fd, data, n, offset)); }
ssize_t pwrite(int fd, const void *data, size_t n, off_t offset) { HELD(syscall(SYS_pwrite64, fd, data, n, offset)); }
ssize_t write(int fd, const void *data, size_t n) {
    off_t offset = lseek(fd, 0, SEEK_CUR);
    HELD(syscall(SYS_write, fd, data, n));
}
#undef NOTED
#define NOTED note_fd('S', fd, 0, 0, 0)
int fsync(int fd) { HELD(syscall(SYS_fsync, fd)); }
int fdatasync(int fd) { HELD(syscall(SYS_fdatasync, fd)); }
#undef NOTED
#define NOTED note_fd('T', fd, (uint64_t)size, 0, 0)
int ftruncate64(int fd, off64_t size) { HELD(syscall(SYS_ftruncate, fd, size)); }
int ftruncate(int fd, off_t size) { HELD(syscall(SYS_ftruncate, fd, size)); }
#undef NOTED
#define NOTED note('U', path, 0, 0, 0)
int unlink(const char *path) { HELD(syscall(SYS_unlinkat, AT_FDCWD, path, 0)); }
