//go:build linux

package rendezvous

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// DefaultDir is where sockets are: $XDG_RUNTIME_DIR/allreduce, else allreduce-<uid> in the folder for temporary files.
func DefaultDir() string {
	if dir := os.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "allreduce")
	}
	return filepath.Join(os.TempDir(), fmt.Sprintf("allreduce-%d", os.Getuid()))
}

// socketPath names a job's socket; the lock beside it says whether its server lives.
func (c *Config) socketPath() string {
	dir := c.Dir
	if dir == "" {
		dir = DefaultDir()
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%d\x00%s", os.Getuid(), c.Job))
	return filepath.Join(dir, hex.EncodeToString(sum[:12])+socketSuffix)
}

const (
	socketSuffix = ".sock"
	lockSuffix   = ".lock"
	longestPath  = 107 // sun_path
)

// ownDir makes the folder and sees to it that nobody else can have put anything there.
func ownDir(dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return &fs.PathError{Op: "lstat", Path: dir, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR || int(st.Uid) != os.Getuid() || st.Mode&0o077 != 0 {
		return fmt.Errorf("%s has to be a folder of this user alone (mode 0700)", dir)
	}
	return nil
}

// takeLock gives the locked file of a path, or nil where another process holds it. The kernel lets go of it however a
// process ends.
func takeLock(path string) (*os.File, error) {
	for {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0o600)
		if err != nil {
			return nil, err
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			_ = f.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, nil
			}
			return nil, err
		}
		// The last holder may have removed the file between our open and our lock: then it is no lock any more.
		mine, err1 := f.Stat()
		there, err2 := os.Lstat(path)
		if err1 == nil && err2 == nil && os.SameFile(mine, there) {
			return f, nil
		}
		_ = f.Close()
	}
}

// removeStale removes the files of servers that have died.
func removeStale(path string) {
	lock, err := takeLock(path + lockSuffix)
	if lock == nil || err != nil {
		return
	}
	_ = os.Remove(path)
	_ = os.Remove(path + lockSuffix)
	_ = lock.Close()
}

func sweep(dir string) {
	names, _ := filepath.Glob(filepath.Join(dir, "*"+socketSuffix+lockSuffix))
	for _, name := range names {
		removeStale(strings.TrimSuffix(name, lockSuffix))
	}
}

// unixListener is a listening socket and the lock that goes with it.
type unixListener struct {
	*net.UnixListener
	path string
	lock *os.File
}

// listenUnix listens for a job, once no other server of the same job does.
func listenUnix(ctx context.Context, c *Config) (*unixListener, error) {
	path := c.socketPath()
	if len(path) > longestPath {
		return nil, fmt.Errorf("%s is too long for a socket: %d bytes, allowed are %d", path, len(path), longestPath)
	}
	if err := ownDir(filepath.Dir(path)); err != nil {
		return nil, err
	}
	sweep(filepath.Dir(path))
	for {
		lock, err := takeLock(path + lockSuffix)
		if err != nil {
			return nil, err
		}
		if lock == nil {
			select {
			case <-ctx.Done():
				return nil, fmt.Errorf("another rank 0 of job %q is waiting for its ranks at %s", c.Job, path)
			case <-time.After(20 * time.Millisecond):
				continue
			}
		}
		_ = os.Remove(path)
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err == nil {
			l.SetUnlinkOnClose(false)
			err = os.Chmod(path, 0o600)
		}
		if err != nil {
			if l != nil {
				_ = l.Close()
			}
			_ = os.Remove(path)
			_ = os.Remove(path + lockSuffix)
			_ = lock.Close()
			return nil, err
		}
		return &unixListener{l, path, lock}, nil
	}
}

func (l *unixListener) Close() error {
	_ = os.Remove(l.path)
	err := l.UnixListener.Close()
	_ = os.Remove(l.path + lockSuffix)
	_ = l.lock.Close()
	return err
}

// peerOf tells whose process is at the other end.
func peerOf(conn *net.UnixConn) (*unix.Ucred, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	var cred *unix.Ucred
	var failed error
	if err := raw.Control(func(fd uintptr) {
		cred, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return nil, err
	}
	return cred, failed
}

// checkPeer refuses other users' processes.
func (c *Config) checkPeer(conn *net.UnixConn) error {
	cred, err := peerOf(conn)
	if err != nil {
		return err
	}
	want := os.Getuid()
	if c.uid != 0 {
		want = c.uid
	}
	if int(cred.Uid) != want {
		return fmt.Errorf("process %d is user %d's, not user %d's", cred.Pid, cred.Uid, want)
	}
	return nil
}

// link is a connection that carries messages. One goroutine receives; sends may come from several.
type link interface {
	send(m message, deadline time.Time) error
	receive(limit int) (message, error)
	deadline(t time.Time) // of receive
	ended() bool          // the other side is gone
	close()
}

// unixLink carries descriptors beside the bytes of a message's header.
type unixLink struct {
	conn  *net.UnixConn
	mutex sync.Mutex // of sends
	files []*os.File // arrived, not yet given to a message
}

func (l *unixLink) deadline(t time.Time) { _ = l.conn.SetReadDeadline(t) }
func (l *unixLink) close()               { _ = l.conn.Close() }

func (l *unixLink) send(m message, deadline time.Time) error {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	if err := l.conn.SetWriteDeadline(deadline); err != nil {
		return err
	}
	var rights []byte
	if len(m.files) > 0 {
		fds := make([]int, len(m.files))
		for i, f := range m.files {
			fds[i] = int(f.Fd())
		}
		rights = unix.UnixRights(fds...)
	}
	header := putHeader(m, len(m.payload))
	n, _, err := l.conn.WriteMsgUnix(header, rights, nil)
	if err != nil {
		return err
	}
	_, err = l.conn.Write(append(header[n:], m.payload...))
	return err
}

func (l *unixLink) receive(limit int) (message, error) {
	header := make([]byte, headerBytes)
	if err := l.fill(header); err != nil {
		l.drop()
		return message{}, err
	}
	m, length, err := parseHeader(header, limit)
	if err == nil {
		m.payload = make([]byte, length)
		err = l.fill(m.payload)
	}
	if err != nil {
		l.drop()
		return message{}, err
	}
	m.files, l.files = l.files, nil
	return m, nil
}

// fill reads a whole buffer and keeps the descriptors that come along.
func (l *unixLink) fill(to []byte) error {
	oob := make([]byte, unix.CmsgSpace(maxFiles*4))
	for len(to) > 0 {
		n, oobn, flags, _, err := l.conn.ReadMsgUnix(to, oob)
		if oobn > 0 {
			if keeping := l.keep(oob[:oobn]); keeping != nil && err == nil {
				err = keeping
			}
		}
		if err == nil && flags&unix.MSG_CTRUNC != 0 {
			err = errGarbage
		}
		if err != nil {
			return err
		}
		if n == 0 {
			return fmt.Errorf("rendezvous: the connection was closed")
		}
		to = to[n:]
	}
	return nil
}

func (l *unixLink) keep(oob []byte) error {
	controls, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return err
	}
	for i := range controls {
		fds, err := unix.ParseUnixRights(&controls[i])
		if err != nil {
			continue
		}
		for _, fd := range fds {
			l.files = append(l.files, os.NewFile(uintptr(fd), "received"))
		}
	}
	if len(l.files) > maxFiles {
		return errGarbage
	}
	return nil
}

func (l *unixLink) drop() {
	for _, f := range l.files {
		_ = f.Close()
	}
	l.files = nil
}

func (l *unixLink) ended() bool { return connEnded(l.conn) }

// connEnded says whether the other side has closed, without reading what it may have sent.
func connEnded(conn syscall.Conn) bool {
	raw, err := conn.SyscallConn()
	if err != nil {
		return true
	}
	ended := false
	err = raw.Control(func(fd uintptr) {
		var one [1]byte
		n, _, err := unix.Recvfrom(int(fd), one[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		ended = err == nil && n == 0 || err != nil && !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR)
	})
	return ended || err != nil
}
