/* The emulated wide-area network. It joins network namespaces through one TUN device each.

   link LATENCY_MS LOSS QUEUE_MS SEED NAME UP DOWN [NAME UP DOWN ...]

A packet leaves its node through an uplink (UP bits per second), travels for LATENCY_MS, is lost with probability LOSS, and
enters its receiver's downlink (DOWN bits per second). A link whose queue is QUEUE_MS long drops further packets. Rates count
IP packets, headers included. The I-th namespace has the address 10.77.0.I, counted from 1. In each the device is `wan0`. The
devices disappear when this process ends, at the end of standard input.

Commands on standard input: `rate I UP DOWN` changes a node's links, `stats` prints one line of JSON.

This runs in user space because many kernels lack netem. Time advances in ticks, which delays each packet by up to TICK_NS.
`late` counts packets delivered more than 5 ms after they were due. If there are any, this process did not get enough CPU
time, and the figures are not reliable. */

#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { MOST_NODES = 254, PACKET_BYTES = 2048, TICK_NS = 500000, LATE_NS = 5000000, BATCH = 64 };
enum { HEADER_BYTES = sizeof(struct virtio_net_hdr) };

struct side { double ns_per_byte; uint64_t free_ns; };
struct node {
    int fd;
    struct side up, down;
    uint64_t sent_bytes, received_bytes, lost, dropped;
};
struct packet { uint64_t due_ns; int to, arrived, bytes; char data[]; };

static struct node nodes[MOST_NODES];
static int count;
static uint64_t latency_ns, queue_ns, delivered, late, latest_ns;
static double loss;
static struct packet **heap;
static size_t held, room;

static uint64_t clock_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}

static void push(struct packet *packet) {
    if (held == room && !(heap = realloc(heap, (room = room * 2 + 1024) * sizeof *heap))) err(1, "realloc");
    size_t at = held++;
    for (; at && heap[(at - 1) / 2]->due_ns > packet->due_ns; at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
    heap[at] = packet;
}

static struct packet *pop(void) {
    struct packet *first = heap[0], *last = heap[--held];
    size_t at = 0, child;
    while ((child = 2 * at + 1) < held) {
        if (child + 1 < held && heap[child + 1]->due_ns < heap[child]->due_ns) child++;
        if (heap[child]->due_ns >= last->due_ns) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = last;
    return first;
}

/* Queue a packet that arrives at `now_ns`. Return when the link has sent it, or 0 if the queue is full. */
static uint64_t pass(struct side *side, uint64_t now_ns, int bytes) {
    if (side->free_ns < now_ns) side->free_ns = now_ns;
    if (side->free_ns - now_ns > queue_ns) return 0;
    return side->free_ns += bytes * side->ns_per_byte;
}

static void take(int from, const char *data, int bytes, uint64_t now_ns) {
    const unsigned char *ip = (const unsigned char *)data + HEADER_BYTES;
    int size = bytes - HEADER_BYTES, to = ip[19] - 1;
    if (size < 20 || ip[0] >> 4 != 4 || ip[16] != 10 || ip[17] != 77 || to < 0 || to >= count || to == from) return;
    uint64_t through_ns = pass(&nodes[from].up, now_ns, size);
    if (!through_ns) { nodes[from].dropped++; return; }
    nodes[from].sent_bytes += size;
    if (drand48() < loss) { nodes[to].lost++; return; }
    struct packet *packet = malloc(sizeof *packet + bytes);
    if (!packet) err(1, "malloc");
    *packet = (struct packet){through_ns + latency_ns, to, 0, bytes};
    memcpy(packet->data, data, bytes);
    push(packet);
}

static void move(struct packet *packet, uint64_t now_ns) {
    struct node *to = &nodes[packet->to];
    if (!packet->arrived) {
        packet->arrived = 1;
        uint64_t through_ns = pass(&to->down, packet->due_ns, packet->bytes - HEADER_BYTES);
        if (through_ns) { packet->due_ns = through_ns; push(packet); return; }
        to->dropped++;
    } else if (write(to->fd, packet->data, packet->bytes) == packet->bytes) {
        uint64_t behind_ns = now_ns - packet->due_ns;
        to->received_bytes += packet->bytes - HEADER_BYTES;
        delivered++;
        late += behind_ns > LATE_NS;
        if (behind_ns > latest_ns) latest_ns = behind_ns;
    } else {
        to->dropped++;
    }
    free(packet);
}

static void set_rates(struct node *node, double up, double down) {
    node->up.ns_per_byte = 8e9 / up;
    node->down.ns_per_byte = 8e9 / down;
}

static void join(struct node *node, const char *name) {
    char path[256];
    snprintf(path, sizeof path, "/run/netns/%s", name);
    int space = open(path, O_RDONLY | O_CLOEXEC);
    if (space < 0 || setns(space, CLONE_NEWNET)) err(1, "%s", path);
    close(space);
    struct ifreq request = {.ifr_name = "wan0", .ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
    node->fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (node->fd < 0 || ioctl(node->fd, TUNSETIFF, &request)) err(1, "/dev/net/tun");
    if (ioctl(node->fd, TUNSETOFFLOAD, TUN_F_CSUM)) err(1, "TUNSETOFFLOAD"); /* packets keep their size; checksums are left out */
}

static void print_stats(void) {
    printf("{\"delivered\": %lu, \"late\": %lu, \"latest_ms\": %.1f, \"cpu_s\": %.2f, \"nodes\": [", delivered, late,
           latest_ns / 1e6, (double)clock() / CLOCKS_PER_SEC);
    for (int i = 0; i < count; i++)
        printf("%s{\"sent_bytes\": %lu, \"received_bytes\": %lu, \"lost\": %lu, \"dropped\": %lu}", i ? ", " : "",
               nodes[i].sent_bytes, nodes[i].received_bytes, nodes[i].lost, nodes[i].dropped);
    printf("]}\n");
    fflush(stdout);
}

/* Run one command from standard input. Return 0 at the end of input. */
static int obey(void) {
    char line[128];
    int i;
    double up, down;
    if (!fgets(line, sizeof line, stdin)) return 0;
    if (!strcmp(line, "stats\n")) print_stats();
    else if (sscanf(line, "rate %d %lf %lf", &i, &up, &down) == 3 && i > 0 && i <= count)
        set_rates(&nodes[i - 1], up, down);
    return 1;
}

int main(int argc, char **argv) {
    if (argc < 8 || (argc - 5) % 3 || (argc - 5) / 3 > MOST_NODES) errx(2, "see the head of link.c");
    latency_ns = atof(argv[1]) * 1e6;
    loss = atof(argv[2]);
    queue_ns = atof(argv[3]) * 1e6;
    srand48(atol(argv[4]));
    int poll = epoll_create1(EPOLL_CLOEXEC);
    setvbuf(stdin, NULL, _IONBF, 0); /* so that epoll sees every line */
    epoll_ctl(poll, EPOLL_CTL_ADD, 0, &(struct epoll_event){.events = EPOLLIN, .data.u32 = MOST_NODES});
    for (; 5 + 3 * count < argc; count++) {
        join(&nodes[count], argv[5 + 3 * count]);
        set_rates(&nodes[count], atof(argv[6 + 3 * count]), atof(argv[7 + 3 * count]));
        epoll_ctl(poll, EPOLL_CTL_ADD, nodes[count].fd, &(struct epoll_event){.events = EPOLLIN, .data.u32 = count});
    }
    sched_setscheduler(0, SCHED_RR, &(struct sched_param){.sched_priority = 1}); /* run before the nodes' processes */
    puts("ready");
    fflush(stdout);
    for (;;) {
        static char data[PACKET_BYTES];
        struct epoll_event ready[MOST_NODES + 1];
        int found = epoll_wait(poll, ready, MOST_NODES + 1, held ? 0 : 1000);
        for (int i = 0; i < found; i++) {
            int node = ready[i].data.u32, bytes;
            if (node == MOST_NODES) {
                if (!obey()) return 0;
                continue;
            }
            uint64_t now_ns = clock_ns();
            for (int k = 0; k < BATCH && (bytes = read(nodes[node].fd, data, sizeof data)) > 0; k++)
                take(node, data, bytes, now_ns);
        }
        uint64_t now_ns = clock_ns();
        while (held && heap[0]->due_ns <= now_ns) move(pop(), now_ns);
        if (held) clock_nanosleep(CLOCK_MONOTONIC, 0, &(struct timespec){0, TICK_NS}, NULL);
    }
}
