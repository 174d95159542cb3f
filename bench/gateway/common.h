/* What the three programs share: the words that every answer is made of, sockets, and the clock.
 *
 * An answer is a function of its seed: word number p of it is words[(seed + p) % num_words]. So a
 * mock needs no model, and the client knows every byte that it must get.
 */
#ifndef COMMON_H
#define COMMON_H
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define MAX_WORDS 4096

static int num_words;
static uint32_t word_ids[MAX_WORDS];
static char *word_texts[MAX_WORDS];

static inline void die(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    exit(1);
}

/* A line is "ID<tab>TEXT"; texts need no JSON escapes. */
static inline void read_words(const char *path) {
    FILE *file = fopen(path, "r");
    char line[256];
    if (!file) die("cannot read %s", path);
    while (fgets(line, sizeof line, file) && num_words < MAX_WORDS) {
        char *tab = strchr(line, '\t');
        if (!tab) die("a line of %s has no tab", path);
        line[strcspn(line, "\n")] = 0;
        word_ids[num_words] = (uint32_t)atoi(line);
        word_texts[num_words++] = strdup(tab + 1);
    }
    if (!num_words) die("%s has no words", path);
    fclose(file);
}

static inline double now_s(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + (double)at.tv_nsec / 1e9;
}

static inline void allow_many_files(void) {
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
}

static inline void no_delay(int fd) {
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

static inline struct sockaddr_in loopback(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

static inline int listen_on(int port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), on = 1;
    struct sockaddr_in address = loopback(port);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, 4096))
        die("cannot listen on port %d: %s", port, strerror(errno));
    return fd;
}

static inline int timer_every(double seconds) {
    struct timespec span = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    struct itimerspec spec = {span, span};
    int fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    timerfd_settime(fd, 0, &spec, NULL);
    return fd;
}

static inline void watch(int epoll, int fd, uint32_t events, void *what) {
    struct epoll_event event = {.events = events, .data.ptr = what};
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event)) die("epoll: %s", strerror(errno));
}

/* Whether tokens leave one a step or as fast as they are read. A mock begins with the latter; SIGUSR1
 * and SIGUSR2 switch between loads. */
static volatile sig_atomic_t is_paced;

static inline void on_pace(int number) { is_paced = number == SIGUSR1; }

static inline void hear_pace(void) {
    struct sigaction action = {.sa_handler = on_pace};
    sigaction(SIGUSR1, &action, NULL);
    sigaction(SIGUSR2, &action, NULL);
}

/* A growing byte buffer; bytes [from, to) are in it. */
typedef struct {
    unsigned char *data;
    size_t from, to, room;
} Buffer;

static inline unsigned char *reserve(Buffer *buffer, size_t more) {
    if (buffer->from == buffer->to) buffer->from = buffer->to = 0;
    if (buffer->to + more > buffer->room) {
        size_t used = buffer->to - buffer->from;
        if (buffer->from) memmove(buffer->data, buffer->data + buffer->from, used);
        buffer->from = 0, buffer->to = used;
        if (used + more > buffer->room) {
            buffer->room = 2 * (used + more);
            buffer->data = realloc(buffer->data, buffer->room);
            if (!buffer->data) die("out of memory");
        }
    }
    return buffer->data + buffer->to;
}

static inline void append(Buffer *buffer, const void *data, size_t size) {
    memcpy(reserve(buffer, size), data, size);
    buffer->to += size;
}

/* Read what is there. Returns 0 when the peer is gone. */
static inline int fill(Buffer *buffer, int fd, size_t most) {
    ssize_t size = recv(fd, reserve(buffer, most), most, 0);
    if (size > 0) buffer->to += (size_t)size;
    return size > 0 || (size < 0 && (errno == EAGAIN || errno == EINTR));
}

/* Write what fits. Returns 0 when the peer is gone. */
static inline int flush(Buffer *buffer, int fd) {
    while (buffer->from < buffer->to) {
        size_t size = buffer->to - buffer->from;
        ssize_t sent = send(fd, buffer->data + buffer->from, size, MSG_NOSIGNAL);
        if (sent < 0) return errno == EAGAIN || errno == EINTR;
        buffer->from += (size_t)sent;
    }
    return 1;
}

/* The number after the first of these keys in a JSON text, or otherwise. */
static inline long json_number(const char *text, const char *key, long otherwise) {
    const char *at = strstr(text, key);
    return at ? strtol(at + strlen(key), NULL, 10) : otherwise;
}
#endif
