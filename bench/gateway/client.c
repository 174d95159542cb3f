/* Load client for /v1/completions: checks every byte of every answer, and reads the CPU time of the
 * process under test at the edges of the measured window.
 *
 *   client PORT WORDS stream|unary CONNECTIONS MAX_TOKENS WARM_S WINDOW_S OPEN_PER_S [PID]...
 *
 * Each connection sends one request after the other. WINDOW_S 0: one request a connection, and the
 * end when all are answered. OPEN_PER_S: how many connections a second are opened, 0 = all at once.
 * Prints one JSON object: counts, CPU seconds of the PIDs in the window, and latencies in ms of the
 * requests that began in it.
 */
#include "common.h"

#include <dirent.h>

enum { GIVE_UP_S = 120 };

typedef struct {
    int fd, is_connected, is_chunked, has_head, is_done, wants_out;
    long seed, num_words;       /* of the answer so far */
    size_t wanted_at, wanted_to; /* in the expected text */
    size_t chunk_left, body_left;
    double sent_at, first_at;
    Buffer in, out, line;
} Conn;

static int port, is_stream, max_tokens, num_conns, epoll_fd;
static char *expected;      /* all words, twice over */
static size_t *word_starts; /* word p begins there */
static double opened_at, window_from, window_to;
static long num_sent, num_answers, num_failed, num_tokens, num_events, num_bytes, num_open, most_open;
static double *first_ms, *whole_ms;
static long num_latencies, room_latencies;

static void begin(Conn *conn) {
    static const char *prompt = "Please repeat what was said in the meeting of last week about the new "
                                "bridge over the river, and who was there, and what it may cost.";
    char body[512], head[256];
    conn->seed = num_sent++ * 7919 % num_words;
    int size = snprintf(body, sizeof body,
                        "{\"model\":\"m\",\"prompt\":\"%s\",\"max_tokens\":%d,\"seed\":%ld,\"temperature\":0,"
                        "\"ignore_eos\":true,\"stream\":%s}", prompt, max_tokens, conn->seed, is_stream ? "true" : "false");
    int head_size = snprintf(head, sizeof head,
                             "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n"
                             "Content-Type: application/json\r\nContent-Length: %d\r\n\r\n", port, size);
    append(&conn->out, head, (size_t)head_size);
    append(&conn->out, body, (size_t)size);
    conn->has_head = conn->is_done = 0, conn->num_words = 0, conn->first_at = 0;
    conn->line.from = conn->line.to = 0;
    conn->wanted_at = word_starts[conn->seed], conn->wanted_to = word_starts[conn->seed + max_tokens];
    conn->sent_at = now_s();
}

static int fail(Conn *conn, const char *why) {
    if (num_failed++ < 3)
        fprintf(stderr, "seed %ld, word %ld: %s: %.300s\n", conn->seed, conn->num_words, why,
                (char *)conn->in.data + conn->in.from);
    return 0;
}

static int take_text(Conn *conn, const char *text, size_t size) {
    if (conn->wanted_at + size > conn->wanted_to || memcmp(expected + conn->wanted_at, text, size))
        return fail(conn, "wrong text");
    conn->wanted_at += size;
    if (size && !conn->first_at) conn->first_at = now_s();
    while (conn->num_words < max_tokens && word_starts[conn->seed + conn->num_words + 1] <= conn->wanted_at)
        conn->num_words++, num_tokens++;
    return 1;
}

/* One line of the body: an event, or the whole of a unary answer. */
static int take_line(Conn *conn, char *line) {
    if (is_stream && !strncmp(line, "data: [DONE]", 12)) return conn->is_done = 1;
    if (is_stream && strncmp(line, "data: ", 6)) return !*line || fail(conn, line);
    char *text = strstr(line, "\"text\":");
    if (!text) return fail(conn, line);
    text += 7 + strspn(text + 7, " ") + 1;
    num_events++;
    if (!is_stream) conn->is_done = 1;
    return take_text(conn, text, strcspn(text, "\""));
}

static int take_body(Conn *conn, const char *data, size_t size) {
    append(&conn->line, data, size);
    Buffer *line = &conn->line;
    if (!is_stream) {
        if (conn->is_chunked) return fail(conn, "a unary answer in chunks");
        if ((conn->body_left -= size)) return 1;
        append(line, "", 1);
        return take_line(conn, (char *)line->data);
    }
    char *end;
    while ((end = memchr(line->data + line->from, '\n', line->to - line->from))) {
        char *start = (char *)line->data + line->from;
        *end = 0;
        line->from += (size_t)(end + 1 - start);
        if (!take_line(conn, start)) return 0;
    }
    return 1;
}

static int take_head(Conn *conn, char *start, char *end) {
    *end = 0;
    if (strncmp(start, "HTTP/1.1 200", 12)) return fail(conn, "status");
    char *length = strcasestr(start, "\r\ncontent-length:");
    conn->is_chunked = strcasestr(start, "\r\ntransfer-encoding:") != NULL;
    conn->body_left = length ? strtoul(length + 17, NULL, 10) : 0;
    conn->chunk_left = 0, conn->has_head = 1;
    conn->in.from += (size_t)(end + 4 - start);
    return 1;
}

/* Take what has arrived. 1 = go on, 2 = the answer is whole, 0 = it is not what it should be. */
static int take(Conn *conn) {
    for (;;) {
        *reserve(&conn->in, 1) = 0;
        char *start = (char *)conn->in.data + conn->in.from;
        size_t size = conn->in.to - conn->in.from;
        if (!conn->has_head) {
            char *end = strstr(start, "\r\n\r\n");
            if (!size || !end) return 1;
            if (!take_head(conn, start, end)) return 0;
        } else if (!conn->is_chunked) {
            size_t part = size < conn->body_left ? size : conn->body_left;
            if (!part) return 1;
            conn->in.from += part;
            if (!take_body(conn, start, part)) return 0;
            if (conn->is_done) return 2;
        } else if (conn->chunk_left > 2) {
            size_t part = size < conn->chunk_left - 2 ? size : conn->chunk_left - 2;
            if (!part) return 1;
            conn->in.from += part, conn->chunk_left -= part;
            if (!take_body(conn, start, part)) return 0;
        } else {
            if (size < conn->chunk_left) return 1;
            start += conn->chunk_left, conn->in.from += conn->chunk_left, conn->chunk_left = 0;
            char *end = strstr(start, "\r\n");
            if (!end) return 1;
            conn->in.from += (size_t)(end + 2 - start);
            conn->chunk_left = strtoul(start, NULL, 16) + 2;
            if (conn->chunk_left == 2) { /* the last chunk: an empty line follows */
                if (!conn->is_done) return fail(conn, "the stream ended early");
                conn->chunk_left = 2;
                if (conn->in.to - conn->in.from >= 2) conn->in.from += 2, conn->chunk_left = 0;
                return 2;
            }
        }
    }
}

static void answered(Conn *conn) {
    double now = now_s();
    if (conn->wanted_at != conn->wanted_to) {
        fail(conn, "the text is too short");
        return;
    }
    num_answers++;
    if (conn->sent_at < window_from || now > window_to) return;
    if (num_latencies == room_latencies) {
        room_latencies = room_latencies ? 2 * room_latencies : 4096;
        first_ms = realloc(first_ms, (size_t)room_latencies * sizeof *first_ms);
        whole_ms = realloc(whole_ms, (size_t)room_latencies * sizeof *whole_ms);
    }
    first_ms[num_latencies] = (conn->first_at - conn->sent_at) * 1e3;
    whole_ms[num_latencies++] = (now - conn->sent_at) * 1e3;
}

static void open_conn(Conn *conn) {
    struct sockaddr_in address = loopback(port);
    conn->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (conn->fd < 0) die("socket: %s", strerror(errno));
    no_delay(conn->fd);
    if (connect(conn->fd, (struct sockaddr *)&address, sizeof address) && errno != EINPROGRESS)
        die("cannot connect to port %d: %s", port, strerror(errno));
    begin(conn);
    conn->wants_out = 1;
    watch(epoll_fd, conn->fd, EPOLLIN | EPOLLOUT, conn);
    if (++num_open > most_open) most_open = num_open;
}

static void close_conn(Conn *conn) {
    close(conn->fd);
    conn->fd = -1, num_open--;
    free(conn->in.data), free(conn->out.data), free(conn->line.data);
    conn->in = conn->out = conn->line = (Buffer){0};
}

static void send_out(Conn *conn) {
    flush(&conn->out, conn->fd);
    int wants_out = conn->out.from < conn->out.to;
    if (wants_out != conn->wants_out) {
        struct epoll_event event = {.events = EPOLLIN | (wants_out ? EPOLLOUT : 0), .data.ptr = conn};
        epoll_ctl(epoll_fd, EPOLL_CTL_MOD, conn->fd, &event);
        conn->wants_out = wants_out;
    }
}

/* Time on a core of all threads of a process: what /proc/PID/stat has as utime + stime, but in ns. */
static double process_cpu_s(const char *pid) {
    char path[300], text[128];
    double seconds = 0;
    snprintf(path, sizeof path, "/proc/%s/task", pid);
    DIR *threads = opendir(path);
    if (!threads) die("there is no process %s any more", pid);
    for (struct dirent *entry; (entry = readdir(threads));) {
        if (*entry->d_name == '.') continue;
        snprintf(path, sizeof path, "/proc/%s/task/%s/schedstat", pid, entry->d_name);
        FILE *file = fopen(path, "r");
        if (!file) continue;
        if (fgets(text, sizeof text, file)) seconds += strtod(text, NULL) / 1e9;
        fclose(file);
    }
    closedir(threads);
    return seconds;
}

static double cpu_s(int argc, char **argv) {
    double seconds = 0;
    for (int i = 9; i < argc; i++) seconds += process_cpu_s(argv[i]);
    return seconds;
}

static int ascending(const void *one, const void *other) {
    double a = *(const double *)one, b = *(const double *)other;
    return a < b ? -1 : a > b;
}

static void print_quantiles(const char *name, double *values) {
    if (num_latencies) qsort(values, (size_t)num_latencies, sizeof *values, ascending);
    printf(", \"%s_p50_ms\": %.4f, \"%s_p99_ms\": %.4f", name,
           num_latencies ? values[num_latencies / 2] : 0.0, name, num_latencies ? values[num_latencies * 99 / 100] : 0.0);
}

int main(int argc, char **argv) {
    if (argc < 9)
        die("usage: client PORT WORDS stream|unary CONNECTIONS MAX_TOKENS WARM_S WINDOW_S OPEN_PER_S [PID]...");
    allow_many_files();
    read_words(argv[2]);
    port = atoi(argv[1]), is_stream = !strcmp(argv[3], "stream"), num_conns = atoi(argv[4]);
    max_tokens = atoi(argv[5]);
    double warm_s = atof(argv[6]), window_s = atof(argv[7]), open_per_s = atof(argv[8]);
    if (max_tokens > num_words) die("answers longer than the list of words");
    word_starts = malloc((size_t)(2 * num_words + 1) * sizeof *word_starts);
    expected = malloc((size_t)num_words * 2 * 256);
    word_starts[0] = 0;
    for (int i = 0; i < 2 * num_words; i++) {
        strcpy(expected + word_starts[i], word_texts[i % num_words]);
        word_starts[i + 1] = word_starts[i] + strlen(word_texts[i % num_words]);
    }
    epoll_fd = epoll_create1(0);
    Conn *conns = calloc((size_t)num_conns, sizeof *conns);
    opened_at = now_s();
    window_from = opened_at + warm_s;
    window_to = window_s ? window_from + window_s : 1e18;
    int num_opened = 0, is_in_window = 0;
    double cpu_before = 0, cpu_after, heard_at = opened_at;
    long tokens_before = 0, answers_before = 0, events_before = 0, bytes_before = 0;
    struct epoll_event events[512];
    for (;;) {
        double now = now_s();
        while (num_opened < num_conns && (!open_per_s || num_opened < (now - opened_at) * open_per_s))
            open_conn(&conns[num_opened++]);
        if (!is_in_window && now >= window_from) {
            is_in_window = 1, window_from = now, window_to = window_s ? now + window_s : 1e18;
            tokens_before = num_tokens, answers_before = num_answers;
            events_before = num_events, bytes_before = num_bytes;
            cpu_before = cpu_s(argc, argv);
        }
        if (now >= window_to || num_failed > 100 || now - heard_at > GIVE_UP_S) break;
        if (!window_s && num_answers + num_failed >= num_conns) break;
        int count = epoll_wait(epoll_fd, events, 512, num_opened < num_conns ? 1 : 100);
        for (int i = 0; i < count; i++) {
            Conn *conn = events[i].data.ptr;
            int state = 1;
            if (events[i].events & EPOLLIN) {
                size_t before = conn->in.to - conn->in.from;
                if (!fill(&conn->in, conn->fd, 1 << 15)) state = fail(conn, "the connection was closed");
                else {
                    heard_at = now;
                    num_bytes += (long)(conn->in.to - conn->in.from - before);
                    state = take(conn);
                }
            } else if (events[i].events & (EPOLLERR | EPOLLHUP)) state = fail(conn, "the connection broke");
            if (state == 2) {
                answered(conn);
                if (window_s) begin(conn);
                else state = 0;
            }
            if (!state) close_conn(conn);
            else send_out(conn);
        }
    }
    cpu_after = cpu_s(argc, argv);
    double took_s = now_s() - window_from;
    printf("{\"answers\": %ld, \"failed\": %ld, \"tokens\": %ld, \"events\": %ld, \"bytes\": %ld, \"seconds\": %.4f, "
           "\"cpu_s\": %.6f, \"all_answers\": %ld, \"most_open\": %ld, \"latencies\": %ld",
           num_answers - answers_before, num_failed, num_tokens - tokens_before, num_events - events_before,
           num_bytes - bytes_before, took_s, cpu_after - cpu_before, num_answers, most_open, num_latencies);
    print_quantiles("first", first_ms);
    print_quantiles("whole", whole_ms);
    printf("}\n");
    return num_failed ? 1 : 0;
}
