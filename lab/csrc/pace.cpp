// Limits the send rate of a process. laconic_lab.network.paced_sockets preloads it (LD_PRELOAD) with
// LACONIC_PACE="RATE BURST".
//
// All TCP sockets of a process share one token bucket of RATE bytes per second and BURST bytes. A blocking socket waits
// for tokens. A non-blocking one sends as many bytes as there are tokens, or sleeps briefly and returns EAGAIN if there
// are none: a loop that polls its sockets (gloo) then reads what has arrived before it tries again, and the sleep keeps
// it from spinning, because such a socket is always ready. A loop that waits for readiness to change, such as that of
// gRPC, would wait forever: this is for gloo and plain sockets only.

#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fcntl.h>
#include <pthread.h>

namespace {

constexpr double longest_nap = 1e-3, shortest_nap = 5e-5, chunk_time = 1e-3;
constexpr int most_pieces = 64;

pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
double rate = 0, burst_s = 0, free_at = 0;  // the bucket is full if free_at is burst_s in the past
size_t chunk = 0;
uint64_t sent = 0;

__attribute__((constructor)) void begin() {
  const char* text = std::getenv("LACONIC_PACE");
  double bytes = 0;
  if (text == nullptr || std::sscanf(text, "%lf %lf", &rate, &bytes) != 2 || !(rate > 0) || !(bytes > 0)) {
    std::fprintf(stderr,
                 "laconic: LACONIC_PACE must be two numbers above 0, bytes per second and burst bytes, got '%s'\n",
                 text ? text : "");
    std::_Exit(2);
  }
  burst_s = bytes / rate;
  chunk = static_cast<size_t>(std::clamp(rate * chunk_time, 1448.0, bytes));
}

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

void nap(double seconds) {
  const auto ns = static_cast<long>(1e9 * std::clamp(seconds, shortest_nap, longest_nap));
  const timespec t{0, ns};
  nanosleep(&t, nullptr);
}

bool paced(int fd) {
  const int before = errno;
  int domain = 0, type = 0;
  socklen_t size = sizeof(int);
  const bool is_tcp = getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 &&
                      (domain == AF_INET || domain == AF_INET6) &&
                      getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_STREAM;
  errno = before;
  return is_tcp;
}

bool waits(int fd, int flags) { return !(flags & MSG_DONTWAIT) && !(fcntl(fd, F_GETFL) & O_NONBLOCK); }

// Returns the seconds until bytes may be sent; takes their tokens if that is now.
double take(size_t bytes) {
  pthread_mutex_lock(&mutex);
  const double t = now(), left = free_at - t;
  if (left <= 0) free_at = std::max(free_at, t - burst_s) + static_cast<double>(bytes) / rate;
  pthread_mutex_unlock(&mutex);
  return left;
}

void settle(size_t taken, ssize_t used) {
  const size_t bytes = used > 0 ? static_cast<size_t>(used) : 0;
  pthread_mutex_lock(&mutex);
  free_at -= static_cast<double>(taken - bytes) / rate;
  sent += bytes;
  pthread_mutex_unlock(&mutex);
}

// The next pieces of a message after `skip` bytes, at most `limit` bytes of them.
size_t head(const msghdr& message, size_t skip, size_t limit, iovec* pieces, size_t& count) {
  size_t bytes = 0;
  count = 0;
  for (size_t i = 0; i < message.msg_iovlen && bytes < limit && count < most_pieces; ++i) {
    const iovec& piece = message.msg_iov[i];
    if (skip >= piece.iov_len) {
      skip -= piece.iov_len;
      continue;
    }
    const size_t size = std::min(piece.iov_len - skip, limit - bytes);
    pieces[count++] = {static_cast<char*>(piece.iov_base) + skip, size};
    bytes += size;
    skip = 0;
  }
  return bytes;
}

ssize_t send_slowly(int fd, const msghdr& message, int flags) {
  const bool blocking = waits(fd, flags);
  size_t done = 0;
  for (;;) {
    iovec pieces[most_pieces];
    msghdr part = message;
    part.msg_iov = pieces;
    const size_t bytes = head(message, done, chunk, pieces, part.msg_iovlen);
    if (const double left = take(bytes); left > 0) {
      if (done && !blocking) return static_cast<ssize_t>(done);
      nap(left);
      if (blocking) continue;
      errno = EAGAIN;
      return -1;
    }
    if (done) part.msg_control = nullptr, part.msg_controllen = 0;
    const ssize_t result = syscall(SYS_sendmsg, fd, &part, flags);
    settle(bytes, result);
    if (result < 0) return done ? static_cast<ssize_t>(done) : result;
    done += static_cast<size_t>(result);
    if (!bytes || (!blocking && static_cast<size_t>(result) < bytes)) return static_cast<ssize_t>(done);
    iovec rest[most_pieces];
    size_t count = 0;
    if (!head(message, done, 1, rest, count)) return static_cast<ssize_t>(done);
  }
}

ssize_t send_one(int fd, const void* data, size_t size, int flags, const sockaddr* to, socklen_t to_size) {
  iovec piece{const_cast<void*>(data), size};
  msghdr message{};
  message.msg_name = const_cast<sockaddr*>(to);
  message.msg_namelen = to_size;
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  return send_slowly(fd, message, flags);
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// The number of bytes that were sent through these functions.
EXPORT uint64_t laconic_paced_bytes() {
  pthread_mutex_lock(&mutex);
  const uint64_t total = sent;
  pthread_mutex_unlock(&mutex);
  return total;
}

EXPORT ssize_t write(int fd, const void* data, size_t size) {
  return paced(fd) ? send_one(fd, data, size, 0, nullptr, 0) : syscall(SYS_write, fd, data, size);
}

EXPORT ssize_t writev(int fd, const iovec* pieces, int count) {
  if (count < 0 || !paced(fd)) return syscall(SYS_writev, fd, pieces, count);
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(pieces);
  message.msg_iovlen = static_cast<size_t>(count);
  return send_slowly(fd, message, 0);
}

EXPORT ssize_t send(int fd, const void* data, size_t size, int flags) {
  return paced(fd) ? send_one(fd, data, size, flags, nullptr, 0)
                   : syscall(SYS_sendto, fd, data, size, flags, nullptr, 0);
}

EXPORT ssize_t sendto(int fd, const void* data, size_t size, int flags, const sockaddr* to, socklen_t to_size) {
  return paced(fd) ? send_one(fd, data, size, flags, to, to_size)
                   : syscall(SYS_sendto, fd, data, size, flags, to, to_size);
}

EXPORT ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  return paced(fd) ? send_slowly(fd, *message, flags) : syscall(SYS_sendmsg, fd, message, flags);
}
