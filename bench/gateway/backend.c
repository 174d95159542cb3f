/* Mock back end for the HTTP routers: answers /v1/completions without a model.
 *
 *   backend PORT WORDS STEP_MS
 *
 * Flat out tokens leave as fast as the router reads them; paced, every stream gets one token a step,
 * all in the same instant, as a continuous batch gives them. The first token comes at once.
 */
#include "common.h"

typedef struct Conn {
    int fd, is_streaming, wants_out;
    long seed, position, max_tokens;
    Buffer in, out;
    struct Conn *next, *previous; /* those that stream */
} Conn;

static int epoll_fd;
static Conn streaming = {.next = &streaming, .previous = &streaming};
static const char *HEAD = "data: {\"id\":\"cmpl-0123456789abcdef0123456789abcdef\",\"object\":\"text_completion\","
                          "\"created\":1790000000,\"model\":\"m\",\"choices\":[{\"index\":0,\"text\":\"";
static const char *TAIL = "\",\"logprobs\":null,\"finish_reason\":null}]}\n\n";
static const char *LAST = "\",\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null}]}\n\n";

static void leave(Conn *conn) {
    if (!conn->is_streaming) return;
    conn->is_streaming = 0;
    conn->next->previous = conn->previous;
    conn->previous->next = conn->next;
}

static void drop(Conn *conn) {
    leave(conn);
    close(conn->fd);
    free(conn->in.data), free(conn->out.data), free(conn);
}

static void add_token(Conn *conn) {
    char chunk[1024], event[900];
    const char *word = word_texts[(conn->seed + conn->position++) % num_words];
    int is_last = conn->position == conn->max_tokens;
    int size = snprintf(event, sizeof event, "%s%s%s", HEAD, word, is_last ? LAST : TAIL);
    size = snprintf(chunk, sizeof chunk, "%x\r\n%s\r\n", size, event);
    append(&conn->out, chunk, (size_t)size);
    if (is_last) {
        const char *end = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
        append(&conn->out, end, strlen(end));
        leave(conn);
    }
}

/* Send what is due; returns 0 when the peer is gone. */
static int push(Conn *conn) {
    if (!flush(&conn->out, conn->fd)) return 0;
    while (!is_paced && conn->is_streaming && conn->out.from == conn->out.to) {
        add_token(conn);
        if (!flush(&conn->out, conn->fd)) return 0;
    }
    int wants_out = conn->out.from < conn->out.to;
    if (wants_out != conn->wants_out) {
        struct epoll_event event = {.events = EPOLLIN | (wants_out ? EPOLLOUT : 0), .data.ptr = conn};
        epoll_ctl(epoll_fd, EPOLL_CTL_MOD, conn->fd, &event);
        conn->wants_out = wants_out;
    }
    return 1;
}

static void answer(Conn *conn, const char *request, const char *body) {
    char text[1 << 16], head[256];
    if (!strncmp(request, "POST", 4) && (strstr(body, "\"stream\":true") || strstr(body, "\"stream\": true"))) {
        const char *response = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
                               "Transfer-Encoding: chunked\r\n\r\n";
        conn->seed = json_number(body, "\"seed\":", 0), conn->position = 0;
        conn->max_tokens = json_number(body, "\"max_tokens\":", 16);
        append(&conn->out, response, strlen(response));
        conn->is_streaming = 1;
        conn->previous = streaming.previous, conn->next = &streaming;
        conn->previous->next = conn->next->previous = conn;
        add_token(conn);
        return;
    }
    size_t size;
    if (!strncmp(request, "POST", 4)) {
        long seed = json_number(body, "\"seed\":", 0), count = json_number(body, "\"max_tokens\":", 16);
        char *at = text;
        at += sprintf(at, "{\"id\":\"cmpl-0\",\"object\":\"text_completion\",\"created\":1790000000,\"model\":\"m\","
                          "\"choices\":[{\"index\":0,\"text\":\"");
        for (long p = 0; p < count && at < text + sizeof text - 512; p++)
            at = stpcpy(at, word_texts[(seed + p) % num_words]);
        at += sprintf(at, "\",\"logprobs\":null,\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":1,"
                          "\"completion_tokens\":%ld,\"total_tokens\":%ld}}", count, count + 1);
        size = (size_t)(at - text);
    } else { /* whatever the routers ask about their workers */
        size = (size_t)sprintf(text, "{\"status\":\"ok\",\"object\":\"list\",\"model_path\":\"m\",\"model_id\":\"m\","
                                     "\"data\":[{\"id\":\"m\",\"object\":\"model\",\"max_model_len\":4096}]}");
    }
    int head_size = sprintf(head, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n", size);
    append(&conn->out, head, (size_t)head_size);
    append(&conn->out, text, size);
}

/* Answer every whole request in the buffer. */
static void take(Conn *conn) {
    for (;;) {
        *reserve(&conn->in, 1) = 0;
        char *start = (char *)conn->in.data + conn->in.from, *end = strstr(start, "\r\n\r\n");
        if (conn->in.from == conn->in.to || !end) return;
        char *header = strcasestr(start, "content-length:");
        size_t length = header && header < end ? strtoul(header + 15, NULL, 10) : 0;
        size_t whole = (size_t)(end + 4 - start) + length;
        if (conn->in.to - conn->in.from < whole) return;
        char after = start[whole];
        start[whole] = 0;
        answer(conn, start, end + 4);
        start[whole] = after;
        conn->in.from += whole;
    }
}

int main(int argc, char **argv) {
    if (argc != 4) die("usage: backend PORT WORDS STEP_MS");
    allow_many_files();
    read_words(argv[2]);
    hear_pace();
    int listener = listen_on(atoi(argv[1])), timer = timer_every(atoi(argv[3]) / 1e3);
    epoll_fd = epoll_create1(0);
    watch(epoll_fd, listener, EPOLLIN, &listener);
    watch(epoll_fd, timer, EPOLLIN, &timer);
    struct epoll_event events[512];
    for (;;) {
        int count = epoll_wait(epoll_fd, events, 512, -1);
        for (int i = 0; i < count; i++) {
            if (events[i].data.ptr == &listener) {
                int fd;
                while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
                    Conn *conn = calloc(1, sizeof *conn);
                    conn->fd = fd;
                    no_delay(fd);
                    watch(epoll_fd, fd, EPOLLIN, conn);
                }
            } else if (events[i].data.ptr == &timer) {
                uint64_t ticks;
                if (read(timer, &ticks, sizeof ticks) < 0 || !is_paced) continue;
                for (Conn *conn = streaming.next, *next; conn != &streaming; conn = next) {
                    next = conn->next;
                    add_token(conn);
                    if (!push(conn)) shutdown(conn->fd, SHUT_RDWR); /* dropped by its own event */
                }
            } else {
                Conn *conn = events[i].data.ptr;
                int is_up = !(events[i].events & (EPOLLERR | EPOLLHUP));
                if (is_up && events[i].events & EPOLLIN) {
                    is_up = fill(&conn->in, conn->fd, 1 << 16);
                    if (is_up) take(conn);
                }
                if (!is_up || !push(conn)) drop(conn);
            }
        }
    }
}
