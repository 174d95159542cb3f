/* Mock pair of pdmesh workers: speaks Worker.Session (gRPC over HTTP/2, proto/) without a model.
 *
 *   mesh PREFILL_PORT DECODE_PORT PREFILL_INCARNATION DECODE_INCARNATION WORDS STEP_MS
 *
 * Prefill answers an order at once with its token and its end. Decode grants and joins at once; then
 * every step's tokens, one of each stream, leave in one message, as from a real worker: flat out a
 * step follows the other as fast as the gateway reads. Joining the gateway is run.py's affair. Only what a gateway says is understood: one call a connection, no
 * padding, no compression of messages; request headers are not even read.
 */
#include "common.h"

enum { DATA = 0, HEADERS = 1, SETTINGS = 4, PING = 6, GOAWAY = 7, WINDOW_UPDATE = 8 };
enum { ACK = 1, END_HEADERS = 4 };
#define BIG_WINDOW 0x7fffffff
#define FRAME_BYTES 16384

typedef struct {
    uint32_t id;
    uint64_t seed;
    uint32_t position, max_tokens;
} Stream;

typedef struct {
    int fd, is_decode, wants_out, has_preface, has_settings;
    uint32_t call; /* HTTP/2 stream of the session, 0 before it is open */
    long long window, call_window, eaten;
    Buffer in, out, messages; /* messages: bytes of DATA frames that came, not yet whole */
    Stream *streams;
    int num_streams, room;
} Conn;

static int epoll_fd, num_conns;
static uint64_t incarnations[2];
static Conn *conns[64];

/* --- protobuf ---------------------------------------------------------------------------------- */

static size_t put_varint(unsigned char *at, uint64_t value) {
    size_t size = 0;
    for (; value > 0x7f; value >>= 7) at[size++] = (unsigned char)(value | 0x80);
    at[size++] = (unsigned char)value;
    return size;
}

static uint64_t get_varint(const unsigned char **at, const unsigned char *end) {
    uint64_t value = 0;
    for (int shift = 0; *at < end && shift < 64; shift += 7) {
        unsigned char byte = *(*at)++;
        value |= (uint64_t)(byte & 0x7f) << shift;
        if (!(byte & 0x80)) break;
    }
    return value;
}

static size_t put_bytes(unsigned char *at, int field, const void *data, size_t size) {
    size_t head = put_varint(at, (uint64_t)field << 3 | 2);
    head += put_varint(at + head, size);
    memcpy(at + head, data, size);
    return head + size;
}

static size_t put_uint(unsigned char *at, int field, uint64_t value) {
    size_t head = put_varint(at, (uint64_t)field << 3);
    return head + put_varint(at + head, value);
}

static size_t put_fixed64(unsigned char *at, int field, uint64_t value) {
    size_t head = put_varint(at, (uint64_t)field << 3 | 1);
    memcpy(at + head, &value, 8);
    return head + 8;
}

/* The next field: its number, its value (or length) and, of bytes, where they are. 0 = the end. */
static int next_field(const unsigned char **at, const unsigned char *end, uint64_t *value,
                      const unsigned char **data) {
    if (*at >= end) return 0;
    uint64_t key = get_varint(at, end);
    *data = NULL, *value = 0;
    switch (key & 7) {
    case 0: *value = get_varint(at, end); break;
    case 1: *at += 8; break;
    case 2: *value = get_varint(at, end), *data = *at, *at += *value; break;
    case 5: *at += 4; break;
    default: die("a protobuf field of type %d", (int)(key & 7));
    }
    return (int)(key >> 3);
}

/* --- HTTP/2 ------------------------------------------------------------------------------------ */

static void put_frame(Conn *conn, int type, int flags, uint32_t stream, const void *data, size_t size) {
    unsigned char head[9] = {(unsigned char)(size >> 16), (unsigned char)(size >> 8), (unsigned char)size,
                             (unsigned char)type, (unsigned char)flags, (unsigned char)(stream >> 24),
                             (unsigned char)(stream >> 16), (unsigned char)(stream >> 8), (unsigned char)stream};
    append(&conn->out, head, 9);
    append(&conn->out, data, size);
}

static void put_window(Conn *conn, uint32_t stream, uint32_t size) {
    uint32_t bytes = htonl(size);
    put_frame(conn, WINDOW_UPDATE, 0, stream, &bytes, 4);
}

/* One gRPC message around one event of the oneof. */
static void put_event(Conn *conn, int field, const unsigned char *body, size_t size) {
    static Buffer message;
    unsigned char head[16] = {0};
    size_t key = put_varint(head + 5, (uint64_t)field << 3 | 2);
    key += put_varint(head + 5 + key, size);
    uint32_t length = htonl((uint32_t)(key + size));
    memcpy(head + 1, &length, 4);
    append(&message, head, 5 + key);
    append(&message, body, size);
    conn->window -= (long long)(message.to - message.from);
    conn->call_window -= (long long)(message.to - message.from);
    while (message.from < message.to) {
        size_t part = message.to - message.from < FRAME_BYTES ? message.to - message.from : FRAME_BYTES;
        put_frame(conn, DATA, 0, conn->call, message.data + message.from, part);
        message.from += part;
    }
}

static void put_hello(Conn *conn) {
    unsigned char hello[64];
    size_t size = put_uint(hello, 1, PROTOCOL_VERSION);
    size += put_uint(hello + size, 2, conn->is_decode ? 3 : 2);
    size += put_fixed64(hello + size, 3, incarnations[conn->is_decode]);
    size += put_bytes(hello + size, 4, "mock", 4);
    put_event(conn, 1, hello, size);
}

/* --- work -------------------------------------------------------------------------------------- */

static Stream read_order(const unsigned char *at, const unsigned char *end) {
    Stream stream = {0};
    uint64_t value;
    const unsigned char *data, *inner;
    for (int field; (field = next_field(&at, end, &value, &data));) {
        if (field == 1) stream.id = (uint32_t)value;
        if (field != 7) continue; /* sampling */
        const unsigned char *inner_end = data + value;
        for (inner = data; (field = next_field(&inner, inner_end, &value, &data));) {
            if (field == 1) stream.max_tokens = (uint32_t)value;
            if (field == 12) stream.seed = value;
        }
    }
    return stream;
}

static uint32_t token_of(const Stream *stream) {
    return word_ids[(stream->seed + stream->position) % (uint64_t)num_words];
}

static void prefill(Conn *conn, Stream stream) {
    static const float not_asked = __builtin_nanf("");
    unsigned char event[128];
    size_t size = put_uint(event, 1, stream.id);
    size += put_uint(event + size, 2, token_of(&stream));
    if (stream.max_tokens == 1) size += put_uint(event + size, 4, 2); /* length */
    event[size++] = 5 << 3 | 5;
    memcpy(event + size, &not_asked, 4), size += 4;
    put_event(conn, 3, event, size);
    size = put_uint(event, 1, stream.id);
    size += put_fixed64(event + size, 2, 4096);
    size += put_bytes(event + size, 5, "mock", 4);
    size += put_bytes(event + size, 6, "layerwise", 9);
    put_event(conn, 4, event, size);
}

static void join(Conn *conn, Stream stream) {
    unsigned char event[128];
    put_event(conn, 5, event, put_uint(event, 1, stream.id));
    size_t size = put_uint(event, 1, stream.id);
    size += put_fixed64(event + size, 2, 4096);
    size += put_bytes(event + size, 5, "mock", 4);
    put_event(conn, 6, event, size);
    if (conn->num_streams == conn->room) {
        conn->room = conn->room ? 2 * conn->room : 64;
        conn->streams = realloc(conn->streams, (size_t)conn->room * sizeof *conn->streams);
    }
    stream.position = 1;
    conn->streams[conn->num_streams++] = stream;
}

static void cancel(Conn *conn, uint32_t id) {
    for (int i = 0; i < conn->num_streams; i++)
        if (conn->streams[i].id == id) {
            conn->streams[i] = conn->streams[--conn->num_streams];
            return;
        }
}

/* One step of the batch: one token of every stream, in one message. */
static void step(Conn *conn) {
    static Buffer columns[4], event;
    int count = conn->num_streams, kept = 0;
    if (!count || conn->window < 64 + 13LL * count || conn->call_window < 64 + 13LL * count) return;
    for (int i = 0; i < count; i++) {
        Stream *stream = &conn->streams[i];
        uint32_t token = token_of(stream);
        unsigned char finish = stream->position + 1 == stream->max_tokens ? 2 : 0;
        append(&columns[0], &stream->id, 4);
        append(&columns[1], &stream->position, 4);
        append(&columns[2], &token, 4);
        append(&columns[3], &finish, 1);
        stream->position++;
        if (!finish) conn->streams[kept++] = *stream;
    }
    conn->num_streams = kept;
    for (int i = 0; i < 4; i++) {
        size_t size = columns[i].to - columns[i].from;
        event.to += put_bytes(reserve(&event, size + 16), i + 1, columns[i].data + columns[i].from, size);
        columns[i].from = columns[i].to;
    }
    put_event(conn, 7, event.data + event.from, event.to - event.from);
    event.from = event.to;
}

static void on_command(Conn *conn, const unsigned char *at, size_t size) {
    uint64_t value;
    const unsigned char *data, *end = at + size;
    int field = next_field(&at, end, &value, &data);
    if (field == 3) (conn->is_decode ? join : prefill)(conn, read_order(data, data + value));
    if (field == 4 && conn->is_decode) cancel(conn, read_order(data, data + value).id);
    if (field == 2 && value) put_event(conn, 2, NULL, 0); /* a heartbeat that asks */
}

static void on_frame(Conn *conn, int type, int flags, uint32_t stream, const unsigned char *data, size_t size) {
    if (type == SETTINGS && !(flags & ACK)) {
        for (; size >= 6; data += 6, size -= 6)
            if (data[0] == 0 && data[1] == 4) /* INITIAL_WINDOW_SIZE */
                conn->call_window = (long long)data[2] << 24 | data[3] << 16 | data[4] << 8 | data[5];
        put_frame(conn, SETTINGS, ACK, 0, NULL, 0);
    } else if (type == PING && !(flags & ACK)) {
        put_frame(conn, PING, ACK, 0, data, size);
    } else if (type == WINDOW_UPDATE) {
        uint32_t more = (uint32_t)data[0] << 24 | data[1] << 16 | data[2] << 8 | data[3];
        *(stream ? &conn->call_window : &conn->window) += more;
    } else if (type == HEADERS && !conn->call) {
        static const char answer[] = "\x88\x0f\x10\x10" "application/grpc"; /* :status 200, content-type */
        conn->call = stream;
        put_frame(conn, HEADERS, END_HEADERS, stream, answer, sizeof answer - 1);
        put_hello(conn);
    } else if (type == DATA) {
        append(&conn->messages, data, size);
        if ((conn->eaten += (long long)size) > 1 << 20) {
            put_window(conn, 0, (uint32_t)conn->eaten);
            put_window(conn, conn->call, (uint32_t)conn->eaten);
            conn->eaten = 0;
        }
        Buffer *from = &conn->messages;
        while (from->to - from->from >= 5) {
            unsigned char *at = from->data + from->from;
            size_t length = (size_t)at[1] << 24 | at[2] << 16 | at[3] << 8 | at[4];
            if (from->to - from->from < 5 + length) break;
            on_command(conn, at + 5, length);
            from->from += 5 + length;
        }
    }
}

static void take(Conn *conn) {
    static const unsigned char big[4] = {0x7f, 0xff, 0xff, 0xff};
    if (!conn->has_preface) {
        if (conn->in.to - conn->in.from < 24) return;
        unsigned char settings[6] = {0, 4};
        memcpy(settings + 2, big, 4);
        conn->in.from += 24, conn->has_preface = 1;
        put_frame(conn, SETTINGS, 0, 0, settings, 6);
        put_window(conn, 0, BIG_WINDOW - 65535);
    }
    while (conn->in.to - conn->in.from >= 9) {
        unsigned char *at = conn->in.data + conn->in.from;
        size_t size = (size_t)at[0] << 16 | at[1] << 8 | at[2];
        if (conn->in.to - conn->in.from < 9 + size) return;
        uint32_t stream = (uint32_t)at[5] << 24 | at[6] << 16 | at[7] << 8 | at[8];
        on_frame(conn, at[3], at[4], stream, at + 9, size);
        conn->in.from += 9 + size;
    }
}

static void drop(Conn *conn) {
    for (int i = 0; i < num_conns; i++)
        if (conns[i] == conn) conns[i] = conns[--num_conns];
    close(conn->fd);
    free(conn->in.data), free(conn->out.data), free(conn->messages.data), free(conn->streams), free(conn);
}

static int push(Conn *conn) {
    if (!flush(&conn->out, conn->fd)) return 0;
    while (!is_paced && conn->num_streams && conn->out.from == conn->out.to) {
        step(conn);
        if (conn->out.from == conn->out.to) break; /* the gateway's window is full */
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

int main(int argc, char **argv) {
    if (argc != 7)
        die("usage: mesh PREFILL_PORT DECODE_PORT PREFILL_INCARNATION DECODE_INCARNATION WORDS STEP_MS");
    int listeners[2] = {listen_on(atoi(argv[1])), listen_on(atoi(argv[2]))};
    for (int i = 0; i < 2; i++) incarnations[i] = strtoull(argv[3 + i], NULL, 10);
    read_words(argv[5]);
    hear_pace();
    epoll_fd = epoll_create1(0);
    int steps = timer_every(atoi(argv[6]) / 1e3);
    int *others[3] = {&listeners[0], &listeners[1], &steps};
    for (int i = 0; i < 3; i++) watch(epoll_fd, *others[i], EPOLLIN, others[i]);
    struct epoll_event events[64];
    for (;;) {
        int count = epoll_wait(epoll_fd, events, 64, -1);
        for (int i = 0; i < count; i++) {
            void *what = events[i].data.ptr;
            uint64_t ticks;
            if (what == &listeners[0] || what == &listeners[1]) {
                int fd = accept4(*(int *)what, NULL, NULL, SOCK_NONBLOCK);
                if (fd < 0 || num_conns == 64) continue;
                Conn *conn = conns[num_conns++] = calloc(1, sizeof *conn);
                *conn = (Conn){.fd = fd, .is_decode = what == &listeners[1], .window = 65535, .call_window = 65535};
                no_delay(fd);
                watch(epoll_fd, fd, EPOLLIN, conn);
            } else if (what == &steps) {
                if (read(steps, &ticks, sizeof ticks) < 0) continue;
                for (int c = 0; c < num_conns; c++) {
                    if (!conns[c]->call) continue;
                    if (conns[c]->is_decode && is_paced) step(conns[c]);
                    if (!push(conns[c])) shutdown(conns[c]->fd, SHUT_RDWR); /* dropped by its own event */
                }
            } else {
                Conn *conn = what;
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
