//go:build linux

package rendezvous

import (
	"bytes"
	"net"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

func FuzzHeader(f *testing.F) {
	f.Add(putHeader(message{kind: kindHello, sequence: 7}, 100), 4096)
	f.Add([]byte("GET / HTTP/1"), 10)
	f.Fuzz(func(t *testing.T, h []byte, limit int) {
		limit &= 1<<20 - 1
		m, n, err := parseHeader(h, limit)
		if err == nil && (n > limit || n < 0 || m.kind > lastKind) {
			t.Fatalf("%v %d", m, n)
		}
	})
}

func FuzzHello(f *testing.F) {
	f.Add([]byte(`{"Rank":1,"World":2,"Fields":[{"Name":"a","Value":"b"}]}`))
	f.Fuzz(func(t *testing.T, payload []byte) {
		h, err := parseHello(payload)
		if err != nil {
			return
		}
		c := Config{World: 2, Fields: []Field{{"a", "b"}}}
		_ = c.compare(&h)
	})
}

func FuzzBlobs(f *testing.F) {
	f.Add(joinBlobs([][]byte{{1, 2}, nil, {3}}), 3)
	f.Fuzz(func(t *testing.T, all []byte, n int) {
		n &= 15
		blobs, err := splitBlobs(all, n)
		if err == nil && !bytes.Equal(joinBlobs(blobs), all) {
			t.Fatal("not the same back")
		}
	})
}

// Any bytes at all on an open connection: the reader ends or gives a message within its bound.
func FuzzConnection(f *testing.F) {
	f.Add(append(putHeader(message{kind: kindGather}, 3), 1, 2, 3))
	f.Fuzz(func(t *testing.T, data []byte) {
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Skip(err)
		}
		var ends [2]net.Conn
		for i, fd := range fds {
			file := os.NewFile(uintptr(fd), "pair")
			ends[i], err = net.FileConn(file)
			_ = file.Close()
			if err != nil {
				t.Fatal(err)
			}
		}
		if len(data) > 32<<10 {
			data = data[:32<<10]
		}
		_, _ = ends[0].Write(data)
		_ = ends[0].Close()
		l := &unixLink{conn: ends[1].(*net.UnixConn)}
		defer l.close()
		for {
			m, err := l.receive(1024)
			if err != nil {
				return
			}
			if len(m.payload) > 1024 {
				t.Fatal(len(m.payload))
			}
		}
	})
}
