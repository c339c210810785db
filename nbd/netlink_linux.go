// SPDX-License-Identifier: Apache-2.0

package nbd

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"time"

	"github.com/mdlayher/genetlink"
	"github.com/mdlayher/netlink"
)

// The kernel's generic netlink family for NBD: include/uapi/linux/nbd-netlink.h.
const (
	nlFamily = "nbd"

	nlConnect     = 1
	nlDisconnect  = 2
	nlReconfigure = 3
	nlStatus      = 5

	attrIndex       = 1
	attrSize        = 2
	attrBlockSize   = 3
	attrTimeout     = 4
	attrServerFlags = 5
	attrSockets     = 7
	attrDeadConn    = 8
	attrDeviceList  = 9
	attrIdentifier  = 10

	attrSockItem = 1
	attrSockFD   = 1

	attrDeviceItem      = 1
	attrDeviceIndex     = 1
	attrDeviceConnected = 2
)

// ErrNoKernel: this kernel has no NBD client.
var ErrNoKernel = errors.New("the kernel has no nbd: modprobe nbd")

// kernel is a connection to the kernel's NBD control.
type kernel struct {
	conn   *genetlink.Conn
	family genetlink.Family
}

func openKernel() (*kernel, error) {
	conn, err := genetlink.Dial(nil)
	if err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	family, err := conn.GetFamily(nlFamily)
	if errors.Is(err, fs.ErrNotExist) {
		err = ErrNoKernel
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return &kernel{conn, family}, nil
}

func (k *kernel) Close() error { return k.conn.Close() }

// call sends a command and waits for the kernel's answer.
func (k *kernel) call(cmd uint8, attrs func(*netlink.AttributeEncoder)) ([]genetlink.Message, error) {
	ae := netlink.NewAttributeEncoder()
	attrs(ae)
	data, err := ae.Encode()
	if err != nil {
		return nil, err
	}
	req := genetlink.Message{Header: genetlink.Header{Command: cmd, Version: k.family.Version}, Data: data}
	return k.conn.Execute(req, k.family.ID, netlink.Request|netlink.Acknowledge)
}

// config is what CONNECT and RECONFIGURE set. Zero values are left out.
type config struct {
	index      int // -1: the kernel chooses
	size       uint64
	blockSize  uint64
	flags      uint64
	timeout    time.Duration
	deadConn   time.Duration
	identifier string
	sockets    []*os.File
}

func (c *config) encode(ae *netlink.AttributeEncoder) {
	if c.index >= 0 {
		ae.Uint32(attrIndex, uint32(c.index))
	}
	for _, a := range []struct {
		attr uint16
		v    uint64
	}{
		{attrSize, c.size}, {attrBlockSize, c.blockSize}, {attrServerFlags, c.flags},
		{attrTimeout, seconds(c.timeout)}, {attrDeadConn, seconds(c.deadConn)},
	} {
		if a.v != 0 {
			ae.Uint64(a.attr, a.v)
		}
	}
	if c.identifier != "" {
		ae.String(attrIdentifier, c.identifier)
	}
	if len(c.sockets) == 0 {
		return
	}
	ae.Nested(attrSockets, func(ae *netlink.AttributeEncoder) error {
		for _, s := range c.sockets {
			ae.Nested(attrSockItem, func(ae *netlink.AttributeEncoder) error {
				ae.Uint32(attrSockFD, uint32(s.Fd()))
				return nil
			})
		}
		return nil
	})
}

// seconds rounds up: the kernel counts whole seconds, and 0 would mean never.
func seconds(d time.Duration) uint64 { return uint64(math.Ceil(d.Seconds())) }

// connect makes a device of the configuration and returns its number.
func (k *kernel) connect(c config) (int, error) {
	msgs, err := k.call(nlConnect, c.encode)
	if err != nil {
		return -1, err
	}
	for _, m := range msgs {
		ad, err := netlink.NewAttributeDecoder(m.Data)
		if err != nil {
			return -1, err
		}
		for ad.Next() {
			if ad.Type() == attrIndex {
				return int(ad.Uint32()), nil
			}
		}
	}
	return -1, errors.New("the kernel named no device")
}

func (k *kernel) reconfigure(c config) error {
	_, err := k.call(nlReconfigure, c.encode)
	return err
}

func (k *kernel) disconnect(index int) error {
	_, err := k.call(nlDisconnect, func(ae *netlink.AttributeEncoder) { ae.Uint32(attrIndex, uint32(index)) })
	return err
}

// DeviceStatus is a device as the kernel lists it.
type DeviceStatus struct {
	Index     int    `json:"index"`
	Path      string `json:"path"`
	Connected bool   `json:"connected"`
	// Identifier is what was given at attach; Size and PID as in sysfs. A
	// connected device whose PID is not alive is stale.
	Identifier string `json:"identifier,omitempty"`
	Size       int64  `json:"size"`
	PID        int    `json:"pid,omitempty"`
}

// status lists every device that the kernel has.
func (k *kernel) status() ([]DeviceStatus, error) {
	msgs, err := k.call(nlStatus, func(*netlink.AttributeEncoder) {})
	if err != nil {
		return nil, err
	}
	var list []DeviceStatus
	for _, m := range msgs {
		ad, err := netlink.NewAttributeDecoder(m.Data)
		if err != nil {
			return nil, err
		}
		for ad.Next() {
			if ad.Type() == attrDeviceList {
				ad.Nested(func(ad *netlink.AttributeDecoder) error {
					for ad.Next() {
						if ad.Type() == attrDeviceItem {
							ad.Nested(func(ad *netlink.AttributeDecoder) error {
								list = append(list, decodeDevice(ad))
								return nil
							})
						}
					}
					return nil
				})
			}
		}
		if err := ad.Err(); err != nil {
			return nil, err
		}
	}
	return list, nil
}

func decodeDevice(ad *netlink.AttributeDecoder) DeviceStatus {
	var d DeviceStatus
	for ad.Next() {
		switch ad.Type() {
		case attrDeviceIndex:
			d.Index = int(ad.Uint32())
		case attrDeviceConnected:
			d.Connected = ad.Uint8() != 0
		}
	}
	return d
}
