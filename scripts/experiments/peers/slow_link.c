/* A link between two network namespaces that holds every packet for a while.

   usage: slow_link DELAY_MS RATE_MBIT      (one way; a rate of 0 is no limit)

   Makes two network namespaces, each with one interface (dni0, 10.77.0.1 and 10.77.0.2), and carries
   packets from one to the other: each leaves when the line is free (RATE_MBIT, with Ethernet's
   overhead) and arrives DELAY_MS later. Queues are so long that nothing is lost. Prints one JSON
   line when the link is up and one with what it carried at the end, which comes when its standard
   input is closed; with its last process a namespace is gone.

   As root, or in a user namespace of its own as anybody who may open /dev/net/tun. Packets are taken
   from TUN devices as the kernel's TCP cut them for segmentation offload (virtio_net.h), up to 64 KB
   in one read, so that the program takes a few per cent of a core and leaves the rest to what is
   measured. Both namespaces get what a fair comparison needs: a congestion control without pacing
   (BBR would slow down traffic in bursts), no slow start after idle times, and room for a long line. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { LARGEST = 65536 + sizeof(struct virtio_net_hdr), ETHERNET = 38, BURST = 32, QUEUE = 10000 };

struct packet {
    struct packet *next;
    int64_t due_ns;
    size_t size;
    char data[];
};

/* One direction of the line. */
struct line {
    struct packet *first, **last;
    int64_t free_ns; /* when its end has sent all that it was given */
    long packets, dropped;
    double bytes, late_ns, latest_ns;
};

static void die(const char *what) {
    fprintf(stderr, "slow_link: %s: %s\n", what, strerror(errno));
    exit(errno == EPERM || errno == EACCES ? 77 : 69);
}

static int put(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t written = write(fd, text, strlen(text));
    close(fd);
    return written < 0 ? -1 : 0;
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* A network namespace of our own; an ordinary user needs a user namespace first. */
static int make_first_namespace(void) {
    if (unshare(CLONE_NEWNET) == 0) return 0;
    char map[64];
    uid_t uid = geteuid();
    gid_t gid = getegid();
    if (unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) die("no network namespace can be made");
    put("/proc/self/setgroups", "deny");
    snprintf(map, sizeof map, "%u %u 1", uid, uid);
    if (put("/proc/self/uid_map", map) != 0) die("uid_map");
    snprintf(map, sizeof map, "%u %u 1", gid, gid);
    if (put("/proc/self/gid_map", map) != 0) die("gid_map");
    return 1;
}

static void bring_up(const char *name, const char *address) {
    struct ifreq request = {0};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) die("socket");
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    if (address != NULL) {
        struct sockaddr_in *in = (struct sockaddr_in *)&request.ifr_addr;
        in->sin_family = AF_INET;
        in->sin_addr.s_addr = inet_addr(address);
        if (ioctl(fd, SIOCSIFADDR, &request) != 0) die("address");
        in->sin_addr.s_addr = inet_addr("255.255.255.0");
        if (ioctl(fd, SIOCSIFNETMASK, &request) != 0) die("netmask");
    }
    request.ifr_qlen = QUEUE; /* nothing is lost while this program waits for a core */
    if (ioctl(fd, SIOCSIFTXQLEN, &request) != 0 && errno != EPERM) die("queue"); /* only root may */
    if (ioctl(fd, SIOCGIFFLAGS, &request) != 0) die(name);
    request.ifr_flags |= IFF_UP | IFF_RUNNING;
    if (ioctl(fd, SIOCSIFFLAGS, &request) != 0) die(name);
    close(fd);
}

/* The TUN device of the present namespace, and its settings; gives the congestion control. */
static int make_end(const char *address, const char **congestion) {
    put("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1");
    put("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1");
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) die("/dev/net/tun");
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
    strcpy(request.ifr_name, "dni0");
    if (ioctl(fd, TUNSETIFF, &request) != 0) die("TUNSETIFF");
    if (ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4) != 0) die("TUNSETOFFLOAD");
    bring_up("lo", NULL);
    bring_up("dni0", address);
    *congestion = put("/proc/sys/net/ipv4/tcp_congestion_control", "cubic") == 0 ? "cubic" : "reno";
    if (**congestion == 'r' && put("/proc/sys/net/ipv4/tcp_congestion_control", "reno") != 0)
        die("tcp_congestion_control");
    if (put("/proc/sys/net/ipv4/tcp_slow_start_after_idle", "0") != 0)
        die("tcp_slow_start_after_idle");
    if (put("/proc/sys/net/ipv4/tcp_no_metrics_save", "1") != 0) die("tcp_no_metrics_save");
    /* Large from the start: on long lines the kernel (6.18) sometimes never widens the window. */
    if (put("/proc/sys/net/ipv4/tcp_rmem", "4096 33554432 67108864") != 0) die("tcp_rmem");
    if (put("/proc/sys/net/ipv4/tcp_wmem", "4096 33554432 67108864") != 0) die("tcp_wmem");
    /* Nothing is lost, so nothing need be sent twice because a queue is long (where the kernel can). */
    put("/proc/sys/net/ipv4/tcp_rto_min_us", "1000000");
    put("/proc/sys/net/ipv4/tcp_early_retrans", "0");
    return fd;
}

/* Bytes on an Ethernet: a packet that the device would have cut has a header for each piece. */
static double wire_bytes(const char *data, size_t size) {
    struct virtio_net_hdr header;
    memcpy(&header, data, sizeof header);
    double bytes = size - sizeof header + ETHERNET;
    if (header.gso_type != VIRTIO_NET_HDR_GSO_NONE && header.gso_size > 0 && size > header.hdr_len) {
        size_t payload = size - sizeof header - header.hdr_len;
        size_t more = (payload + header.gso_size - 1) / header.gso_size - 1;
        bytes += more * (double)(header.hdr_len + ETHERNET);
    }
    return bytes;
}

static void take(struct line *line, int fd, double ns_per_byte, int64_t delay_ns) {
    static char buffer[LARGEST];
    for (int i = 0; i < BURST; i++) {
        ssize_t size = read(fd, buffer, sizeof buffer);
        if (size <= (ssize_t)sizeof(struct virtio_net_hdr)) return;
        struct packet *packet = malloc(sizeof *packet + size);
        if (packet == NULL) die("memory");
        int64_t now = now_ns();
        double bytes = wire_bytes(buffer, size);
        if (line->free_ns < now) line->free_ns = now;
        line->free_ns += (int64_t)(bytes * ns_per_byte);
        line->bytes += bytes;
        *packet = (struct packet){NULL, line->free_ns + delay_ns, size};
        memcpy(packet->data, buffer, size);
        *line->last = packet;
        line->last = &packet->next;
    }
}

/* Hand over what is due; gives the time of the next packet, or INT64_MAX. */
static int64_t give(struct line *line, int fd) {
    while (line->first != NULL) {
        struct packet *packet = line->first;
        int64_t late = now_ns() - packet->due_ns;
        if (late < 0) return packet->due_ns;
        if (write(fd, packet->data, packet->size) < 0) line->dropped++;
        line->packets++;
        line->late_ns += late;
        if (late > line->latest_ns) line->latest_ns = late;
        line->first = packet->next;
        if (line->first == NULL) line->last = &line->first;
        free(packet);
    }
    return INT64_MAX;
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: slow_link DELAY_MS RATE_MBIT\n");
        return 64;
    }
    int64_t delay_ns = (int64_t)(atof(argv[1]) * 1e6);
    double rate = atof(argv[2]) * 1e6, ns_per_byte = rate > 0 ? 8e9 / rate : 0;
    const char *addresses[2] = {"10.77.0.1", "10.77.0.2"}, *congestion = "";
    int tun[2], space[2], user = make_first_namespace();
    for (int i = 0; i < 2; i++) {
        if (i == 1 && unshare(CLONE_NEWNET) != 0) die("no second network namespace can be made");
        tun[i] = make_end(addresses[i], &congestion);
        space[i] = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
        if (space[i] < 0) die("/proc/self/ns/net");
    }
    prctl(PR_SET_TIMERSLACK, 1000UL, 0, 0, 0);
    struct sched_param first = {.sched_priority = 1};
    int prompt = sched_setscheduler(0, SCHED_FIFO, &first) == 0 || setpriority(PRIO_PROCESS, 0, -20) == 0;
    printf("{\"pid\": %d, \"net\": [%d, %d], \"user\": %s, \"congestion\": \"%s\", \"prompt\": %s}\n",
           getpid(), space[0], space[1], user ? "true" : "false", congestion, prompt ? "true" : "false");
    fflush(stdout);

    struct line lines[2] = {0}; /* lines[i] leads from namespace i to the other one */
    lines[0].last = &lines[0].first;
    lines[1].last = &lines[1].first;
    struct pollfd fds[3] = {
        {.fd = tun[0], .events = POLLIN}, {.fd = tun[1], .events = POLLIN}, {.fd = 0, .events = POLLIN}};
    for (;;) {
        int64_t a = give(&lines[0], tun[1]), b = give(&lines[1], tun[0]), next = a < b ? a : b;
        struct timespec left = {0}, *timeout = NULL;
        if (next != INT64_MAX) {
            int64_t ns = next - now_ns();
            if (ns > 0) left = (struct timespec){ns / 1000000000, ns % 1000000000};
            timeout = &left;
        }
        if (ppoll(fds, 3, timeout, NULL) < 0 && errno != EINTR) die("ppoll");
        for (int i = 0; i < 2; i++)
            if (fds[i].revents & POLLIN) take(&lines[i], tun[i], ns_per_byte, delay_ns);
        char byte;
        if (fds[2].revents && read(0, &byte, 1) <= 0) break;
    }
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    double packets = lines[0].packets + lines[1].packets;
    printf("{\"packets\": [%ld, %ld], \"bytes\": [%.0f, %.0f], \"dropped\": %ld, \"late_ms\": %.3f, "
           "\"latest_ms\": %.3f, \"cpu_s\": %.3f}\n",
           lines[0].packets, lines[1].packets, lines[0].bytes, lines[1].bytes,
           lines[0].dropped + lines[1].dropped,
           packets > 0 ? (lines[0].late_ns + lines[1].late_ns) / packets / 1e6 : 0,
           (lines[0].latest_ns > lines[1].latest_ns ? lines[0].latest_ns : lines[1].latest_ns) / 1e6,
           used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6);
    return 0;
}
