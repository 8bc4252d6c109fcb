/* router.c - the packet path of the emulated internet, which daemon.py compiles, configures and starts.
 *
 * A packet read from a host's TUN waits for that host's uplink (rate, drop-tail queue), travels for the
 * link's delay, waits for the receiver's downlink (likewise) and is written to the receiver's TUN.
 * The TUNs carry TSO super-packets (a virtio header, then up to 64 KiB of IPv4 + TCP); every limit is
 * counted in MTU packets ("segments"), and a super-packet is cut up only where some of them are lost.
 *
 *   router CTL_FD SECONDS SEED { TUN_FD IPV4 UP_BYTES/S DOWN_BYTES/S UP_QUEUE DOWN_QUEUE }...
 *
 * CTL_FD is a datagram socket: "set A B DELAY_US LOSS" and "cut A B 0|1" change one direction (A and B are
 * indexes), "stat" changes nothing, "quit" ends (as the end of SECONDS does).  Each is answered with counters; "flow B"
 * with the bytes that have come from each host to B.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { MAXH = 64, BATCH = 256, VH = 10 };       /* hosts; packets read per TUN and tick; virtio header */
enum { TICK = 250000, IDLE = 2000000, SECOND = 1000000000 };        /* ns */
enum { MAXEV = 1 << 20, MAXHELD = 1 << 30 };    /* packets, bytes on their way at most */
typedef int64_t ns_t;

struct host {
    int fd; uint32_t ip;
    double up, down, up_q, down_q;              /* bytes/ns, bytes */
    ns_t up_free, down_free;                    /* when each transmitter falls idle */
    unsigned long long tx, rx, pkts, lost, overflow, stray;
};
struct link { ns_t delay; double loss; int cut; unsigned long long rx; };
struct pkt {                                    /* segs segments of seg bytes, wire bytes in all */
    struct link *link;                          /* NULL once it waits for delivery */
    struct host *dst;
    ns_t tail;                                  /* when its last byte is at the far end */
    int len, mss, hl, segs, seg, wire;
    uint8_t data[];
};
struct event { ns_t when; uint64_t order; struct pkt *p; };

static struct host host[MAXH];
static struct link links[MAXH][MAXH];
static struct event *heap;
static int hosts, events;
static uint64_t order, rng;
static long held;
static ns_t late;                               /* the worst lateness of a delivery since the last answer */

static ns_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * (ns_t)SECOND + t.tv_nsec;
}

static double rnd(void)                         /* xorshift64, in [0, 1) */
{
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return (rng >> 11) * 0x1p-53;
}

static int before(const struct event *a, const struct event *b)
{
    return a->when < b->when || (a->when == b->when && a->order < b->order);
}

static void drop(struct pkt *p) { held -= p->len; free(p); }

static void push(ns_t when, struct pkt *p)
{
    if (events == MAXEV || held > MAXHELD) { p->dst->overflow += p->segs; drop(p); return; }
    struct event e = { when, order++, p };
    int i = events++;
    for (; i && before(&e, &heap[(i - 1) / 2]); i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
    heap[i] = e;
}

static struct pkt *pop(void)
{
    struct pkt *p = heap[0].p;
    struct event e = heap[--events];
    int i = 0, c;
    while ((c = 2 * i + 1) < events) {
        if (c + 1 < events && before(&heap[c + 1], &heap[c])) c++;
        if (!before(&heap[c], &e)) break;
        heap[i] = heap[c];
        i = c;
    }
    heap[i] = e;
    return p;
}

static unsigned get16(const uint8_t *b) { return b[0] << 8 | b[1]; }
static void put16(uint8_t *b, unsigned v) { b[0] = v >> 8; b[1] = v; }
static unsigned fold(uint32_t c) { c = (c & 0xffff) + (c >> 16); return (c & 0xffff) + (c >> 16); }

/* Keep segments [s, e) of a packet; of a super-packet this rewrites the headers. */
static struct pkt *part(const struct pkt *q, int s, int e)
{
    int body = q->segs > 1 ? VH + q->hl : 0, from = s * q->mss, n = q->len - body - from;
    if (e < q->segs) n = (e - s) * q->mss;
    struct pkt *p = malloc(sizeof *p + body + n);
    if (!p) return NULL;
    *p = *q;
    memcpy(p->data, q->data, body);
    memcpy(p->data + body, q->data + body + from, n);
    p->len = body + n;
    held += p->len;
    p->segs = e - s;
    p->wire = p->len - VH + (p->segs - 1) * q->hl;
    if (p->segs == q->segs) return p;
    uint8_t *ip = p->data + VH, *tcp = ip + (ip[0] & 15) * 4;
    unsigned old_len = get16(ip + 2), len = p->len - VH;
    if (p->segs == 1) p->data[1] = p->data[4] = p->data[5] = 0;     /* no longer TSO */
    put16(ip + 2, len);
    put16(ip + 4, get16(ip + 4) + s);
    put16(ip + 10, 0);
    uint32_t c = 0, seq;
    for (uint8_t *b = ip; b < tcp; b += 2) c += get16(b);
    put16(ip + 10, ~fold(c));
    memcpy(&seq, tcp + 4, 4);
    seq = htonl(ntohl(seq) + from);
    memcpy(tcp + 4, &seq, 4);
    if (e < q->segs) tcp[13] &= ~0x09;          /* FIN and PSH belong to the last segment, */
    if (s) tcp[13] &= ~0x80;                    /* CWR to the first */
    put16(tcp + 16, fold(get16(tcp + 16) + len + 0xffff - old_len));    /* pseudo-header sum */
    return p;
}

/* How many of a packet's segments fit a drop-tail queue with this much room. */
static int fit(const struct pkt *p, double room)
{
    if (p->wire <= room) return p->segs;
    return p->segs == 1 || room < p->seg ? 0 : (int)(room / p->seg);
}

static void ingress(struct host *src, struct pkt *q, int len, ns_t now)     /* q: only data is set */
{
    const uint8_t *data = q->data, *ip = data + VH;
    uint32_t to = 0;
    struct host *dst = NULL;
    if (len >= VH + 20 && ip[0] >> 4 == 4) memcpy(&to, ip + 16, 4);
    for (int i = 0; i < hosts; i++) if (host[i].ip == to && host + i != src) dst = host + i;
    if (!dst) { src->stray++; return; }
    struct link *l = &links[src - host][dst - host];
    if (l->cut) return;
    *q = (struct pkt){ .link = l, .dst = dst, .len = len, .segs = 1, .seg = len - VH, .wire = len - VH };
    uint16_t mss;                               /* in this machine's byte order */
    memcpy(&mss, data + 4, 2);
    if (data[1] && mss) {                       /* TSO */
        int ihl = (ip[0] & 15) * 4;
        q->mss = mss;
        q->hl = ihl + (ip[ihl + 12] >> 4) * 4;
        q->segs = (len - VH - q->hl + mss - 1) / mss;
        if (q->segs > 1) q->seg = q->hl + mss;
        q->wire += (q->segs - 1) * q->hl;
    }
    ns_t start = now > src->up_free ? now : src->up_free;
    int keep = fit(q, src->up_q - (start - now) * src->up), s = 0;
    int wire = keep == q->segs ? q->wire : keep * q->seg;
    src->overflow += q->segs - keep;
    src->up_free = start + wire / src->up;
    src->tx += wire;
    src->pkts++;
    for (int e = 0; e <= keep; e++) {           /* each run [s, e) without loss travels as one packet */
        int gone = e < keep && l->loss > 0 && rnd() < l->loss;
        src->lost += gone;
        if (e < keep && !gone) continue;
        struct pkt *p = e > s ? part(q, s, e) : NULL;
        if (p) {
            int first = p->wire < p->seg ? p->wire : p->seg;
            p->tail = start + (ns_t)(((double)s * q->seg + p->wire) / src->up) + l->delay;
            push(start + (ns_t)(((double)s * q->seg + first) / src->up) + l->delay, p);
        }
        s = e + 1;
    }
}

static void deliver(struct pkt *p, ns_t when)   /* an event is due */
{
    struct host *d = p->dst;
    if (!p->link) {
        if (write(d->fd, p->data, p->len) < 0) d->stray++;
        drop(p);
        return;
    }
    ns_t start = when > d->down_free ? when : d->down_free;
    int keep = p->link->cut ? 0 : fit(p, d->down_q - (start - when) * d->down);
    if (keep < p->segs) {
        struct pkt *rest = keep ? part(p, 0, keep) : NULL;
        if (!p->link->cut) d->overflow += p->segs - keep;
        drop(p);
        if (!(p = rest)) return;
    }
    d->down_free = start + p->wire / d->down;
    d->rx += p->wire;
    p->link->rx += p->wire;
    p->link = NULL;
    int last = p->wire < p->seg ? p->wire : p->seg;
    ns_t end = p->tail + (ns_t)(last / d->down);
    push(end > d->down_free ? end : d->down_free, p);
}

static int control(int fd)
{
    char in[256], out[16384];
    struct sockaddr_un from;
    socklen_t fl = sizeof from;
    ssize_t n = recvfrom(fd, in, sizeof in - 1, MSG_DONTWAIT, (void *)&from, &fl);
    unsigned a, b; long us; double loss; int cut, o = 0;
    if (n < 0) return 1;
    in[n] = 0;
    if (sscanf(in, "set %u %u %ld %lf", &a, &b, &us, &loss) == 4 && a < MAXH && b < MAXH) {
        links[a][b].delay = us * 1000;
        links[a][b].loss = loss;
    }
    if (sscanf(in, "cut %u %u %d", &a, &b, &cut) == 3 && a < MAXH && b < MAXH) links[a][b].cut = cut;
    if (sscanf(in, "flow %u", &b) == 1 && b < MAXH) {
        for (int i = 0; i < hosts; i++) o += snprintf(out + o, sizeof out - o, " %llu", links[i][b].rx);
        sendto(fd, out, o, MSG_DONTWAIT, (void *)&from, fl);
        return 1;
    }
    struct timespec cpu;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu);
    o = sprintf(out, "%.4f %.4f %d", cpu.tv_sec + cpu.tv_nsec / 1e9, late / 1e6, events);
    late = 0;
    for (struct host *h = host; h < host + hosts; h++)
        o += snprintf(out + o, sizeof out - o, " %llu %llu %llu %llu %llu %llu",
                      h->tx, h->rx, h->pkts, h->lost, h->overflow, h->stray);
    sendto(fd, out, o, MSG_DONTWAIT, (void *)&from, fl);
    return strcmp(in, "quit");
}

int main(int argc, char **argv)
{
    static struct { struct pkt p; uint8_t data[1 << 17]; } in;
    struct pollfd pf[MAXH + 1];
    int ctl = atoi(argv[1]);
    ns_t end = now_ns() + (ns_t)(atof(argv[2]) * 1e9);
    rng = strtoull(argv[3], 0, 10) * 0x9E3779B97F4A7C15ULL + 0x9E3779B97F4A7C15ULL;
    if (!rng) rng = 1;
    for (char **a = argv + 4; a + 5 < argv + argc && hosts < MAXH; a += 6, hosts++)
        host[hosts] = (struct host){ .fd = atoi(a[0]), .ip = inet_addr(a[1]), .up = atof(a[2]) / 1e9,
                                      .down = atof(a[3]) / 1e9, .up_q = atof(a[4]), .down_q = atof(a[5]) };
    for (int i = 0; i < hosts; i++) pf[i] = (struct pollfd){ host[i].fd, POLLIN, 0 };
    pf[hosts] = (struct pollfd){ ctl, POLLIN, 0 };
    heap = malloc(sizeof *heap * MAXEV);
    prctl(PR_SET_TIMERSLACK, 1);
    prctl(PR_SET_PDEATHSIG, SIGKILL);           /* never outlive the daemon */
    for (ns_t busy = 0; control(ctl);) {        /* busy: until when packets are handled in ticks */
        ns_t now = now_ns();
        if (now > end) break;
        while (events && heap[0].when <= now) {
            ns_t when = heap[0].when;
            struct pkt *p = pop();
            if (!p->link && now - when > late) late = now - when;
            deliver(p, when);
        }
        for (int i = 0; i < hosts; i++)
            for (int k = 0; k < BATCH; k++) {
                ssize_t n = read(host[i].fd, in.p.data, sizeof in.data);
                if (n <= 0) break;
                ingress(host + i, &in.p, n, now_ns());
                busy = now + IDLE;
            }
        /* Each wake-up costs a virtual machine 15 us or more: while packets come, wake once per tick. */
        ns_t wake = now < busy ? now + TICK : now + SECOND;
        if (now >= busy && events && heap[0].when < wake) wake = heap[0].when;
        ns_t left = wake - now_ns();
        struct timespec sleep = { left / SECOND, left % SECOND };
        if (left > 0) ppoll(pf, now < busy ? 0 : hosts + 1, &sleep, NULL);
    }
    return 0;
}
