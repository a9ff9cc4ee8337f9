package faulty

import (
	"encoding/binary"
	"io"
)

// What the proxy has to know of RFC 9113 section 4.1 and 6.
const (
	frameData         = 0x0
	frameHeaders      = 0x1
	frameRSTStream    = 0x3
	frameGoAway       = 0x7
	frameContinuation = 0x9

	flagEndStream  = 0x1
	flagEndHeaders = 0x4

	frameHeaderLen = 9
	maxStreamID    = 1<<31 - 1

	clientPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
)

// A frame is its nine bytes of header and the payload, as on the wire.
type frame []byte

func newFrame(kind, flags byte, stream uint32, payload []byte) frame {
	n := len(payload)
	f := frame{byte(n >> 16), byte(n >> 8), byte(n), kind, flags, 0, 0, 0, 0}
	binary.BigEndian.PutUint32(f[5:], stream)
	return append(f, payload...)
}

func (f frame) kind() byte         { return f[3] }
func (f frame) has(flag byte) bool { return f[4]&flag != 0 }
func (f frame) stream() uint32     { return binary.BigEndian.Uint32(f[5:]) & maxStreamID }

// readFrame reads one frame. A frame is at most 16 MiB.
func readFrame(r io.Reader) (frame, error) {
	f := make(frame, frameHeaderLen)
	if _, err := io.ReadFull(r, f); err != nil {
		return nil, err
	}
	n := int(f[0])<<16 | int(f[1])<<8 | int(f[2])
	f = append(f, make([]byte, n)...)
	_, err := io.ReadFull(r, f[frameHeaderLen:])
	return f, err
}

// readBlock reads one frame, and if it is a HEADERS frame also the
// CONTINUATION frames that belong to it: nothing may come between them.
func readBlock(r io.Reader) ([]frame, error) {
	f, err := readFrame(r)
	if err != nil {
		return nil, err
	}
	block := []frame{f}
	for block[0].kind() == frameHeaders && !f.has(flagEndHeaders) {
		if f, err = readFrame(r); err != nil {
			return nil, err
		}
		block = append(block, f)
	}
	return block, nil
}

// addField appends a header field to a header block. The field has a frame
// of its own and HPACK's literal form without indexing (RFC 7541 section
// 6.2.2): neither the existing bytes nor the compression state of either
// side have to be known. Name and value are shorter than 127 bytes.
func addField(block []frame, name, value string) []frame {
	last := block[len(block)-1]
	last[4] &^= flagEndHeaders
	field := append([]byte{0, byte(len(name))}, name...)
	field = append(append(field, byte(len(value))), value...)
	return append(block, newFrame(frameContinuation, flagEndHeaders, last.stream(), field))
}

func rstStreamFrame(stream uint32, code Code) frame {
	return newFrame(frameRSTStream, 0, stream, binary.BigEndian.AppendUint32(nil, uint32(code)))
}

// goAwayFrame has the code NO_ERROR.
func goAwayFrame(last uint32) frame {
	return newFrame(frameGoAway, 0, 0, binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, last), 0))
}
